/*
 * skep-agent: the one small native program of a Skep sandbox, in four lives.
 *
 *   launch   On the host. Waits on socket 3 for orders: join these control groups, then drop to this user and
 *            become bwrap. A launcher that already sits in its control groups makes a sandbox start quickly.
 *   door     On the host, for a moment. Enters a sandbox's network namespace and nothing else of it, makes every
 *            address there lead to itself, opens listening sockets and hands them out to the egress proxy.
 *   call     Inside a container, as what its engine starts. Takes the system call filter on itself, connects to the
 *            controller on a socket that is shown there, and serves.
 *   serve    Inside, as pid 1. Starts commands on pipes that the controller made and hands over, reports how
 *            they end, and dies with the controller, which takes everything inside with it. The controller may
 *            admit guests, other processes of its user, each on a socket of its own: they start commands too,
 *            reach nobody's but their own, and take those with them when they go.
 *
 * Commands run under the same uid as the agent. It is safe from them because it is pid 1 of the namespace (the
 * kernel drops signals from inside), not dumpable (no /proc/1/mem, no /proc/1/fd, no ptrace), and holds nothing
 * but its sockets. Output never passes through it, so no command can forge another's. Messages have a fixed size
 * and travel in SOCK_SEQPACKET records; what varies in length comes in a memory file.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/nsfs.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#define CONTROL_FD 3
#define MAX_FDS 32
#define MAX_GUESTS 64
#define MAX_PAYLOAD (64u << 20)
#define START_TURNS 100
#define START_TURN_MS 50
#define PAUSED_TURN_MS 200

enum order_kind { JOIN = 1, LAUNCH = 2, SPAWN = 3, SIGNAL = 4, PAUSE = 5, RESUME = 6, CONNECT = 7, NETWORK = 8,
                  OPEN = 9, ADMIT = 10, HOLD = 11, RELEASE = 12, BEGIN = 13, END = 14 };
enum report_kind { READY = 1, STARTED = 2, REFUSED = 3, EXITED = 4, DONE = 5, LEFT = 6 };
/* Where a spawn failed, reported with errno: the caller words the message. */
enum stage { AT_PAYLOAD = 1, AT_FORK = 2, AT_TERMINAL = 3, AT_LIMIT = 4, AT_CWD = 5, AT_EXEC = 6 };

struct order {
    uint32_t kind, id;
    int32_t a, b, c, d;
};

struct report {
    uint32_t kind, id;
    int32_t a, b;
    uint64_t user_us, system_us, peak_kb;
};

/* Whoever gives orders. Each counts its commands for itself, so an id means something only together with its giver. */
struct controller {
    int fd;        /* -1 for nobody. */
    uint32_t name; /* The id of the order that admitted a guest: so the first controller calls it. */
    uint32_t busy; /* How much the guest does to the files by itself, through the root folder that it was given. */
};

struct running {
    pid_t pid;
    uint32_t id;
    struct controller *from; /* NULL once that has gone: nobody is told of its end. */
    int doomed;              /* What is left of its group goes when it does. */
    int cause;               /* The limit for which the first controller had it ended; only its giver knows names. */
    struct running *next;
};

static struct running *table;
static struct controller first = {.fd = CONTROL_FD}, guests[MAX_GUESTS];
static int oom_score_fd = -1;
static int paused;
static int held, holds; /* Meanwhile, what guests order waits; and how often that was so. */

static void fail(const char *what) {
    int error = errno;
    dprintf(2, "skep-agent: %s: %s\n", what, strerror(error));
    _exit(125);
}

static void drop(struct controller *guest);

/* The first controller is waited for, as nothing can go on without it; a guest that does not read is let go. */
static void report_with(struct controller *to, struct report r, const int *fds, int count) {
    struct iovec part = {&r, sizeof r};
    union { char bytes[CMSG_SPACE(MAX_FDS * sizeof(int))]; struct cmsghdr align; } control;
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (count > 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(head), fds, count * sizeof(int));
    }
    while (to->fd >= 0 && sendmsg(to->fd, &message, MSG_NOSIGNAL | (to == &first ? 0 : MSG_DONTWAIT)) < 0) {
        if (errno == EINTR) continue;
        if (to == &first) _exit(0); /* The controller is gone. */
        drop(to);
    }
}

static void report(struct controller *to, struct report r, int fd) { report_with(to, r, &fd, fd >= 0); }

static void close_all(const int *fds, int count) {
    for (int i = 0; i < count; i++) close(fds[i]);
}

/* Returns how many descriptors came along, or -1 if this was no order or the end of all orders. */
static int receive_from(int from, struct order *o, int *fds, int flags) {
    struct iovec part = {o, sizeof *o};
    union { char bytes[CMSG_SPACE(MAX_FDS * sizeof(int))]; struct cmsghdr align; } control;
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    ssize_t got;
    while ((got = recvmsg(from, &message, flags)) < 0)
        if (errno != EINTR) return -1;
    int count = 0;
    for (struct cmsghdr *head = CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head))
        if (head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS) {
            int more = (head->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(fds + count, CMSG_DATA(head), more * sizeof(int));
            count += more;
        }
    if (got == sizeof *o && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC))) return count;
    close_all(fds, count);
    return -1;
}

/* The same from the first controller; leaves for good at its end. */
static int receive(struct order *o, int *fds, int flags) {
    int count = receive_from(CONTROL_FD, o, fds, flags);
    if (count < 0) _exit(0);
    return count;
}

static void default_signals(void) {
    for (int number = 1; number < NSIG; number++) signal(number, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* ---- launch ------------------------------------------------------------------------------------------- */

static void join_groups(int *fds, int count) {
    for (int i = 0; i < count; i++) {
        if (write(fds[i], "0", 1) != 1) fail("cannot join the control group");
        close(fds[i]);
    }
}

/* bwrap looks its sources up by path, which the sandbox's own user may not be able to walk. So root shows them to
 * it at `place`, by descriptor, in a mount namespace that only this process has and that goes with it. */
static void show(uint32_t which, int *fds, const char *place) {
    int mounts[MAX_FDS];
    for (int i = 0; i < MAX_FDS; i++) /* Taken before the namespace is left: afterwards they are another's. */
        if (which >> i & 1 &&
            (mounts[i] = syscall(SYS_open_tree, fds[i], "", AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC)) < 0)
            fail("cannot take a folder for bwrap");
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=64k"))
        fail("cannot set up a mount namespace");
    for (int i = 0; i < MAX_FDS; i++) {
        char target[512];
        struct stat info;
        if (!(which >> i & 1)) continue;
        snprintf(target, sizeof target, "%s/%d", place, fds[i]);
        int made = fstat(fds[i], &info) ? -1
                 : S_ISDIR(info.st_mode) ? mkdir(target, 0755)
                 : open(target, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0444);
        if (made < 0 || syscall(SYS_move_mount, mounts[i], "", AT_FDCWD, target, MOVE_MOUNT_F_EMPTY_PATH))
            fail("cannot show a folder to bwrap");
    }
}

/* fds[0] is bwrap, fds[1] its arguments, fds[2] (when d is set) a library that bwrap needs and the user may not
 * be able to reach by path. All the rest keep their numbers: the arguments refer to them. */
static void become_bwrap(const struct order *o, int *fds, const char *place) {
    if (o->id) show(o->id, fds, place);
    if (o->c && (setgroups(0, NULL) || setresgid(o->b, o->b, o->b) || setresuid(o->a, o->a, o->a)))
        fail("cannot become the sandbox's own user");
    default_signals();
    umask(022);
    char args[16], preload[64];
    snprintf(args, sizeof args, "%d", fds[1]);
    char *argv[] = {"bwrap", "--args", args, "--", "/run/skep/agent", "serve", NULL};
    snprintf(preload, sizeof preload, "LD_PRELOAD=/proc/self/fd/%d", o->d ? fds[2] : -1);
    char *env[] = {o->d ? preload : NULL, NULL};
    syscall(SYS_execveat, fds[0], "", argv, env, AT_EMPTY_PATH);
    fail("cannot run bwrap");
}

static int launch(const char *place) {
    /* Descriptors that leaked into the controller go no further, and those to come get known numbers. */
    syscall(SYS_close_range, CONTROL_FD + 1, ~0u, 0);
    for (;;) {
        struct order o;
        int fds[MAX_FDS];
        int count = receive(&o, fds, 0);
        if (o.kind == JOIN) join_groups(fds, count);
        else if (o.kind == LAUNCH) become_bwrap(&o, fds, place);
        else return 125;
    }
}

/* ---- door --------------------------------------------------------------------------------------------- */

/* Send the kernel one request, with one attribute behind it, and return how it went. */
static int ask_kernel(struct nlmsghdr *ask, int kind, const void *value, size_t size) {
    struct rtattr *attribute = (void *)((char *)ask + NLMSG_ALIGN(ask->nlmsg_len));
    attribute->rta_type = kind;
    attribute->rta_len = RTA_LENGTH(size);
    memcpy(RTA_DATA(attribute), value, size);
    ask->nlmsg_len = NLMSG_ALIGN(ask->nlmsg_len) + RTA_LENGTH(size);
    struct { struct nlmsghdr head; struct nlmsgerr error; char rest[256]; } answer;
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
    if (fd < 0 || send(fd, ask, ask->nlmsg_len, 0) < 0 || recv(fd, &answer, sizeof answer, 0) < 0) return -1;
    close(fd);
    errno = -answer.error.error;
    return answer.error.error ? -1 : 0;
}

/* Make every address of a family a local one: what is sent anywhere arrives at this namespace's own sockets. */
static int lead_home(int family) {
    struct { struct nlmsghdr head; struct rtmsg route; char attribute[64]; } ask = {
        .head = {.nlmsg_len = NLMSG_LENGTH(sizeof(struct rtmsg)), .nlmsg_type = RTM_NEWROUTE,
                 .nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE},
        .route = {.rtm_family = family, .rtm_table = RT_TABLE_LOCAL, .rtm_protocol = RTPROT_STATIC,
                  .rtm_scope = family == AF_INET ? RT_SCOPE_HOST : RT_SCOPE_UNIVERSE, .rtm_type = RTN_LOCAL}};
    int loopback = if_nametoindex("lo");
    return ask_kernel(&ask.head, RTA_OIF, &loopback, sizeof loopback);
}

/* Programs that look names up only for families in use want to see an address besides loopback's. */
static int show_address(void) {
    struct { struct nlmsghdr head; struct ifaddrmsg address; char attribute[64]; } ask = {
        .head = {.nlmsg_len = NLMSG_LENGTH(sizeof(struct ifaddrmsg)), .nlmsg_type = RTM_NEWADDR,
                 .nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE},
        .address = {.ifa_family = AF_INET, .ifa_prefixlen = 32, .ifa_index = if_nametoindex("lo")}};
    struct in_addr address = {htonl(0xC613FFFE)}; /* 198.19.255.254, which stands for no name */
    return ask_kernel(&ask.head, IFA_LOCAL, &address, sizeof address);
}

/* One socket for both families where the namespace has IPv6, for IPv4 alone where not. */
static int listener(uint16_t port, int type, int family) {
    int yes = 1, no = 0, fd = socket(family, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(port)};
    if (fd < 0) return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (family == AF_INET6) {
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
        setsockopt(fd, IPPROTO_IPV6, IPV6_RECVPKTINFO, &yes, sizeof yes);
    }
    setsockopt(fd, IPPROTO_IP, IP_PKTINFO, &yes, sizeof yes);
    if (bind(fd, family == AF_INET6 ? (void *)&six : (void *)&four, family == AF_INET6 ? sizeof six : sizeof four) ||
        (type == SOCK_STREAM && listen(fd, 1024))) {
        close(fd);
        return -1;
    }
    return fd;
}

/* A container may share its user namespace with the host, and one cannot enter where one is. */
static int is_own(int userns) {
    struct stat own, other;
    return !stat("/proc/self/ns/user", &own) && !fstat(userns, &other) && own.st_dev == other.st_dev &&
           own.st_ino == other.st_ino;
}

/* fds[0] is the network namespace, fds[1] the ports as 16-bit numbers. For port 53 a datagram socket comes too,
 * right behind the other. The namespace belongs to the sandbox's user namespace, which has to be entered first. */
static int open_door(const struct order *o, int *fds) {
    uint16_t ports[MAX_FDS / 2];
    int opened[MAX_FDS], count = 0;
    ssize_t size = pread(fds[1], ports, sizeof ports, 0);
    int owner = ioctl(fds[0], NS_GET_USERNS);
    if (size < 0 || owner < 0 || (!is_own(owner) && setns(owner, CLONE_NEWUSER)) || setns(fds[0], CLONE_NEWNET))
        fail("cannot enter the sandbox's network");
    if (o->a && (lead_home(AF_INET) || show_address())) fail("cannot set the sandbox's routes");
    int family = lead_home(AF_INET6) ? AF_INET : AF_INET6;
    for (size_t i = 0; i < size / sizeof *ports; i++) {
        for (int type = SOCK_STREAM; type == SOCK_STREAM || (type == SOCK_DGRAM && ports[i] == 53);
             type = type == SOCK_STREAM ? SOCK_DGRAM : 0)
            if ((opened[count++] = listener(ports[i], type, family)) < 0) fail("cannot listen in the sandbox");
    }
    report_with(&first, (struct report){.kind = DONE, .id = o->id}, opened, count);
    return 0;
}

static int door(void) {
    struct order o;
    int fds[MAX_FDS];
    int count = receive(&o, fds, MSG_CMSG_CLOEXEC);
    return o.kind == OPEN && count == 2 ? open_door(&o, fds) : 125;
}

/* ---- serve -------------------------------------------------------------------------------------------- */

struct payload {
    void *base;
    size_t size;
    uint32_t argc, envc, limits;
    char *cwd, **argv, **env;
    struct { uint32_t resource, pad; uint64_t soft, hard; } *limit;
};

/* The layout is written by the controller (`Spawn.payload`): counts, limits, then NUL-terminated strings. What a guest
 * hands over must be sealed: cut or changed while it is read, it would take this agent and all the others down. */
static int parse(int fd, int from_guest, struct payload *p) {
    struct stat info;
    int seals = from_guest ? fcntl(fd, F_GET_SEALS) : F_SEAL_SHRINK | F_SEAL_WRITE;
    if (seals < 0 || ~seals & (F_SEAL_SHRINK | F_SEAL_WRITE)) return -1;
    if (fstat(fd, &info) || info.st_size < 16 || info.st_size > MAX_PAYLOAD) return -1;
    char *base = mmap(NULL, info.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    if (base == MAP_FAILED) return -1;
    p->base = base;
    p->size = info.st_size;
    char *end = base + info.st_size, *at = base + 16;
    if (end[-1] != 0) return -1;
    memcpy(&p->argc, base, 4);
    memcpy(&p->envc, base + 4, 4);
    memcpy(&p->limits, base + 8, 4);
    if (p->argc < 1 || p->argc > 1u << 20 || p->envc > 1u << 20 || p->limits > 16) return -1;
    p->limit = (void *)at;
    at += p->limits * sizeof *p->limit;
    p->argv = calloc(p->argc + p->envc + 2, sizeof(char *));
    if (!p->argv) return -1;
    p->env = p->argv + p->argc + 1;
    for (uint32_t i = 0; i < 1 + p->argc + p->envc; i++) {
        if (at >= end) return -1;
        if (i == 0) p->cwd = at;
        else if (i <= p->argc) p->argv[i - 1] = at;
        else p->env[i - 1 - p->argc] = at;
        at += strlen(at) + 1;
    }
    return 0;
}

static void discard(struct payload *p) {
    free(p->argv);
    if (p->base) munmap(p->base, p->size);
}

static void refuse(int pipe_fd, int stage) {
    int32_t word[2] = {errno, stage};
    (void)!write(pipe_fd, word, sizeof word);
    _exit(127);
}

static int open_terminal(const struct order *o, char *path, size_t size) {
    int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC), unlock = 0, number;
    if (master < 0) return -1;
    if (ioctl(master, TIOCSPTLCK, &unlock) || ioctl(master, TIOCGPTN, &number)) { close(master); return -1; }
    struct winsize window = {.ws_row = o->b, .ws_col = o->c};
    ioctl(master, TIOCSWINSZ, &window);
    struct termios modes;
    if (!tcgetattr(master, &modes)) { /* So that the erase key takes back a whole character. */
        modes.c_iflag |= IUTF8;
        tcsetattr(master, TCSANOW, &modes);
    }
    snprintf(path, size, "/dev/pts/%d", number);
    return master;
}

/* Commands are one user, and /proc would let one print into another's output or write its memory. Each gets a Landlock
 * domain of its own, which the kernel does not let others reach into. The domain forbids nothing else: REFER, moving
 * files between folders, has to be named to be allowed, and block devices cannot be made here anyway. */
static int fence = -1;

static int make_fence(void) {
    uint64_t handled = LANDLOCK_ACCESS_FS_REFER | LANDLOCK_ACCESS_FS_MAKE_BLOCK;
    struct landlock_path_beneath_attr all = {.allowed_access = LANDLOCK_ACCESS_FS_REFER};
    int rules = syscall(SYS_landlock_create_ruleset, &handled, sizeof handled, 0);
    if (rules < 0) return -1; /* A kernel without it: the doctor says so. */
    all.parent_fd = open("/", O_PATH | O_CLOEXEC);
    if (syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &all, 0)) fail("cannot fence commands off");
    close(all.parent_fd);
    return rules;
}

static void child(struct payload *p, int *fds, const char *terminal, int errors) {
    /* Not dumpable until exec: before that its neighbours could write its memory, or answer for it on `errors`. */
    close(CONTROL_FD);
    for (int i = 0; i < MAX_GUESTS; i++)
        if (guests[i].fd >= 0) close(guests[i].fd);
    setsid();
    if (terminal) {
        int slave = open(terminal, O_RDWR);
        if (slave < 0 || ioctl(slave, TIOCSCTTY, 0)) refuse(errors, AT_TERMINAL);
        for (int i = 0; i < 3; i++) dup2(slave, i);
        if (slave > 2) close(slave);
    } else {
        for (int i = 0; i < 3; i++) dup2(fds[i + 1], i);
    }
    default_signals();
    for (uint32_t i = 0; i < p->limits; i++) {
        struct rlimit limit = {p->limit[i].soft, p->limit[i].hard};
        if (setrlimit(p->limit[i].resource, &limit)) refuse(errors, AT_LIMIT);
    }
    umask(022);
    if (fence >= 0 && syscall(SYS_landlock_restrict_self, fence, 0)) refuse(errors, AT_LIMIT);
    if (chdir(p->cwd)) refuse(errors, AT_CWD);
    environ = p->env;
    execvp(p->argv[0], p->argv);
    refuse(errors, AT_EXEC);
}

/* Returns 8 if the child said why it could not become the command, 0 once it has. A neighbour may halt the child on
 * its way, which must halt neither this agent nor its death with the controller. */
static ssize_t hear(int errors, pid_t pid, int32_t *word) {
    struct pollfd watched[] = {{errors, POLLIN, 0}, {CONTROL_FD, 0, 0}};
    for (int turn = 0; turn < START_TURNS; turn++) {
        int ready = poll(watched, 2, START_TURN_MS);
        if (ready > 0 && watched[1].revents) _exit(0);
        if (ready > 0) return read(errors, word, 2 * sizeof *word);
        kill(pid, SIGCONT);
    }
    kill(pid, SIGKILL);
    word[0] = ETIME;
    word[1] = AT_FORK;
    return 2 * sizeof *word;
}

/* What is forked inherits the score: out of memory, the kernel ends commands before it ends the agent. */
static void score_oom(const char *score) {
    int error = errno;
    if (oom_score_fd >= 0) (void)!write(oom_score_fd, score, strlen(score));
    errno = error;
}

/* Fork and wait until the child has become the command or said why it could not. */
static struct report start(struct controller *from, const struct order *o, struct payload *p, int *fds,
                           const char *terminal) {
    struct report r = {.kind = REFUSED, .id = o->id, .b = AT_FORK};
    int errors[2];
    int32_t word[2];
    struct running *entry = malloc(sizeof *entry);
    if (!entry || pipe2(errors, O_CLOEXEC)) { r.a = errno; free(entry); return r; }
    score_oom("1000");
    pid_t pid = fork();
    if (pid == 0) child(p, fds, terminal, errors[1]);
    r.a = errno;
    score_oom("0");
    close(errors[1]);
    if (pid > 0 && hear(errors[0], pid, word) == sizeof word) {
        r.a = word[0];
        r.b = word[1];
    } else if (pid > 0) {
        *entry = (struct running){.pid = pid, .id = o->id, .from = from, .next = table};
        table = entry;
        entry = NULL;
        r = (struct report){.kind = STARTED, .id = o->id, .a = pid};
    }
    close(errors[0]);
    free(entry);
    return r;
}

static void spawn(struct controller *from, const struct order *o, int *fds, int count) {
    struct report r = {.kind = REFUSED, .id = o->id, .a = EINVAL, .b = AT_PAYLOAD};
    struct payload p = {0};
    char terminal[32];
    int master = -1;
    if (count == (o->a ? 1 : 4) && !parse(fds[0], from != &first, &p)) {
        if (o->a && (master = open_terminal(o, terminal, sizeof terminal)) < 0) {
            r.a = errno;
            r.b = AT_TERMINAL;
        } else {
            r = start(from, o, &p, fds, o->a ? terminal : NULL);
        }
    }
    discard(&p);
    report(from, r, r.kind == STARTED ? master : -1);
    if (master >= 0) close(master);
}

static void answer(struct controller *to, const struct order *o, int error) {
    report(to, (struct report){.kind = error ? REFUSED : DONE, .id = o->id, .a = error}, -1);
}

/* The first controller may also name a guest, for all that it runs, and with c a limit for which they are ended; or,
 * without an id, a pid as seen inside, -1 for everything but the agent. */
static void send_signal(struct controller *from, const struct order *o) {
    if (o->id == 0 && from != &first) { answer(from, o, EPERM); return; }
    if (o->id == 0 && (o->c == -1 || o->c > 1)) kill(o->c, o->a);
    for (struct running *entry = table; entry; entry = entry->next) {
        int of_guest = from == &first && entry->from && entry->from != &first && entry->from->name == o->id;
        if (!of_guest && (entry->from != from || entry->id != o->id)) continue;
        entry->doomed |= o->d;
        if (of_guest) entry->cause = o->c;
        kill(o->b ? entry->pid : -entry->pid, o->a);
    }
}

static void reap(void) {
    for (;;) {
        siginfo_t dead = {0};
        if (waitid(P_ALL, 0, &dead, WEXITED | WNOHANG | WNOWAIT) || dead.si_pid == 0) return;
        struct running **link = &table, *entry;
        while (*link && (*link)->pid != dead.si_pid) link = &(*link)->next;
        entry = *link;
        /* Until it is reaped its number is nobody else's, so the rest of its group can be ended by it. */
        if (entry && entry->doomed) kill(-entry->pid, SIGKILL);
        int status;
        struct rusage use;
        if (wait4(dead.si_pid, &status, 0, &use) < 0 || !entry) continue;
        if (entry->from) report(entry->from, (struct report){.kind = EXITED, .id = entry->id,
                .a = WIFEXITED(status) ? WEXITSTATUS(status) : entry->cause,
                .b = WIFSIGNALED(status) ? WTERMSIG(status) : 0,
                .user_us = use.ru_utime.tv_sec * 1000000ull + use.ru_utime.tv_usec,
                .system_us = use.ru_stime.tv_sec * 1000000ull + use.ru_stime.tv_usec,
                .peak_kb = use.ru_maxrss}, -1);
        *link = entry->next;
        free(entry);
    }
}

/* Hand out a descriptor that only somebody inside can make, or say why not. */
static void hand_out(struct controller *to, const struct order *o, int fd) {
    if (fd < 0) { answer(to, o, errno); return; }
    report(to, (struct report){.kind = DONE, .id = o->id}, fd);
    close(fd);
}

/* A connection to a server inside, on its way: whoever gets it waits for it, so that this agent never does. */
static int connect_inside(uint16_t port, int six) {
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct sockaddr_in6 there = {.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || !connect(fd, six ? (void *)&there : (void *)&four, six ? sizeof there : sizeof four) ||
        errno == EINPROGRESS)
        return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

/* Every command leads a group of its own, so what the guest started ends and nothing besides. */
static void drop(struct controller *guest) {
    shutdown(guest->fd, SHUT_RDWR); /* A command on its way to exec may still have a copy. */
    close(guest->fd);
    guest->fd = -1;
    for (struct running *entry = table; entry; entry = entry->next)
        if (entry->from == guest) {
            entry->from = NULL;
            entry->doomed = 1;
            kill(-entry->pid, SIGKILL);
        }
    report(&first, (struct report){.kind = LEFT, .id = guest->name}, -1);
}

/* Say that the agent serves, with the one thing that cannot be had from outside. */
static void welcome(struct controller *to) {
    int root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0) fail("cannot open the root folder");
    report(to, (struct report){.kind = READY}, root);
    close(root);
}

static int is_records(int fd) {
    int domain = 0, type = 0;
    socklen_t size = sizeof(int);
    return !getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) && domain == AF_UNIX &&
           !getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) && type == SOCK_SEQPACKET;
}

/* Takes the socket over, and returns 0; or leaves it and returns why. */
static int admit(const struct order *o, const int *fds, int count) {
    if (count != 1 || !is_records(fds[0])) return EINVAL;
    for (int i = 0; i < MAX_GUESTS; i++)
        if (guests[i].fd < 0) {
            guests[i] = (struct controller){.fd = fds[0], .name = o->id};
            answer(&first, o, 0); /* Before the guest has reason to leave. */
            welcome(&guests[i]);
            return 0;
        }
    return EUSERS;
}

/* With nothing but this agent here, what is mounted can be changed: nobody stands in it. Those who have just ended
 * are reaped first; what is still left, be it a zombie whose parent lives, counts. So does a guest amid the files. */
static int hold(void) {
    reap();
    if (!kill(-1, 0) || errno != ESRCH) return EBUSY;
    for (int i = 0; i < MAX_GUESTS; i++)
        if (guests[i].fd >= 0 && guests[i].busy) return EBUSY;
    held = 1;
    holds++;
    return 0;
}

/* What concerns everybody inside is for the first controller alone. Returns how many descriptors are left to close. */
static int obey_first(const struct order *o, int *fds, int count) {
    int error = 0;
    switch (o->kind) {
    case PAUSE: paused = 1; kill(-1, SIGSTOP); break;
    case RESUME: paused = 0; kill(-1, SIGCONT); break;
    case HOLD: error = hold(); break;
    case RELEASE: held = 0; break;
    case NETWORK:
        hand_out(&first, o, open(o->a ? "/proc/self/ns/mnt" : "/proc/self/ns/net", O_RDONLY | O_CLOEXEC));
        return count;
    case ADMIT:
        if (!(error = admit(o, fds, count))) return 0;
        break;
    default: _exit(0);
    }
    answer(&first, o, error);
    return count;
}

/* A guest says when it begins to work on the files and when it has ended. It is told how often they have been held:
 * by that it knows whether they may be others than before. */
static void obey_guest(struct controller *guest, const struct order *o) {
    switch (o->kind) {
    case BEGIN: guest->busy++; report(guest, (struct report){.kind = DONE, .id = o->id, .a = holds}, -1); break;
    case END: guest->busy -= guest->busy > 0; answer(guest, o, 0); break;
    default: answer(guest, o, EPERM);
    }
}

static void obey(struct controller *from) {
    struct order o;
    int fds[MAX_FDS];
    int count = from == &first ? receive(&o, fds, MSG_CMSG_CLOEXEC)
                               : receive_from(from->fd, &o, fds, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (count < 0) { drop(from); return; }
    switch (o.kind) {
    case SPAWN: spawn(from, &o, fds, count); break;
    case SIGNAL: send_signal(from, &o); break;
    case CONNECT: hand_out(from, &o, connect_inside(o.a, o.b)); break;
    default:
        if (from == &first) count = obey_first(&o, fds, count);
        else obey_guest(from, &o);
    }
    close_all(fds, count);
}

/* Guests come before the first controller: only that one makes new ones, so none is taken for another's successor. */
static void attend(const struct pollfd *watched) {
    for (int i = 0; i < MAX_GUESTS; i++) {
        if (guests[i].fd < 0 || !watched[i].revents) continue;
        if (watched[i].revents & ~POLLIN) drop(&guests[i]); /* It has hung up: what it still wanted is no matter. */
        else obey(&guests[i]);
    }
}

static void serve(void) {
    if (getpid() != 1) { errno = EPERM; fail("serve runs only as pid 1 of a sandbox"); }
    syscall(SYS_close_range, CONTROL_FD + 1, ~0u, 0);
    /* Opened while it still can be: what is not dumpable belongs to root. */
    oom_score_fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (prctl(PR_SET_DUMPABLE, 0)) fail("cannot hide from the sandbox");
    /* With the controller gone the socket says so; this is for bwrap, which the controller may have to kill. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail("cannot die with bwrap");
    if (prctl(PR_GET_SECCOMP) != 2 || prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1) {
        errno = EPERM;
        fail("refusing to serve without a system call filter");
    }
    fcntl(CONTROL_FD, F_SETFD, FD_CLOEXEC);
    default_signals();
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    sigprocmask(SIG_BLOCK, &children, NULL);
    int ended = signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK);
    if (ended < 0) fail("cannot start");
    fence = make_fence();
    for (int i = 0; i < MAX_GUESTS; i++) guests[i].fd = -1;
    welcome(&first);
    struct pollfd watched[2 + MAX_GUESTS] = {{CONTROL_FD, POLLIN, 0}, {ended, POLLIN, 0}};
    for (;;) {
        for (int i = 0; i < MAX_GUESTS; i++) watched[2 + i] = (struct pollfd){guests[i].fd, held ? 0 : POLLIN, 0};
        if (poll(watched, 2 + MAX_GUESTS, paused ? PAUSED_TURN_MS : -1) < 0) {
            if (errno != EINTR) fail("poll");
            continue;
        }
        /* A process may have arranged for the kernel to wake it, when a file changes or its terminal goes. */
        if (paused) kill(-1, SIGSTOP);
        if (watched[1].revents) {
            struct signalfd_siginfo info;
            while (read(ended, &info, sizeof info) > 0) {}
            reap();
        }
        attend(watched + 2);
        if (watched[0].revents) obey(&first);
    }
}

/* ---- call --------------------------------------------------------------------------------------------- */

/* The engine has a profile of its own; this one is every sandbox's, whichever engine it is. */
static void take_filter(const char *path) {
    static struct sock_filter program[BPF_MAXINSNS];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, program, sizeof program);
    struct sock_fprog filter = {size > 0 ? size / sizeof *program : 0, program};
    if (size <= 0 || size % sizeof *program || prctl(PR_SET_SECCOMP, 2, &filter))
        fail("cannot take the system call filter");
    close(fd);
}

static void call(const char *address, const char *filter) {
    struct sockaddr_un there = {.sun_family = AF_UNIX};
    syscall(SYS_close_range, CONTROL_FD, ~0u, 0);
    take_filter(filter); /* Before the call: until then the engine passes complaints on. */
    snprintf(there.sun_path, sizeof there.sun_path, "%s", address);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (fd != CONTROL_FD || connect(fd, (void *)&there, sizeof there)) fail("cannot reach the controller");
    serve();
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "launch")) return launch(argv[2]);
    if (argc == 2 && !strcmp(argv[1], "door")) return door();
    if (argc == 2 && !strcmp(argv[1], "serve")) serve();
    if (argc == 4 && !strcmp(argv[1], "call")) call(argv[2], argv[3]);
    dprintf(2, "skep-agent is started by Skep and is of no use by itself.\n");
    return 2;
}
