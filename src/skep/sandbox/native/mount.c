/*
 * skep-mount: lay a workspace's layers and other folders into a sandbox that runs, and go.
 *
 * It runs on the host and never in it: what it mounts it mounts in a namespace of its own, from which the finished
 * mounts are moved into the sandbox. Nothing is left behind however it ends, and bwrap need not know of overlays.
 *
 *   fd 3     orders: strings that end in NUL, as `stack.py` writes them
 *   fd 4     the sandbox's mount namespace
 *   fd 5...  the folders of the host, when Skep runs as root; otherwise the orders give their paths
 *
 * Root could mount everything itself, but an overlay acts with the rights of whoever mounted it. So root only makes
 * the folders reachable, each shown as belonging to the sandbox's own user, and then becomes that user. In the user
 * namespace of a sandbox that has one, that user may mount; a container has none, and the user keeps root's right to.
 *
 * A mount point is opened below the sandbox's root without following any link, and mounted on by its descriptor. The
 * agent can write where some of these are: a link planted there stops the mount, and cannot lead it elsewhere.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <linux/nsfs.h>
#include <linux/openat2.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#define ORDERS_FD 3
#define SANDBOX_FD 4
#define FIRST_SOURCE_FD 5
#define MAX_ORDERS (1 << 20)
#define MAX_OPTIONS 4096 /* The kernel takes a page. */
#define MAX_TARGETS 256
#ifndef MOUNT_ATTR_IDMAP
#define MOUNT_ATTR_IDMAP 0x00100000
#endif

struct attributes { uint64_t set, clear, propagation, userns; }; /* struct mount_attr, which not every libc has */

static char orders[MAX_ORDERS], *at, *end;
static int sources, as_root, half_done;

static void fail(const char *what, const char *which) {
    int error = errno;
    dprintf(2, "%s%s%s: %s\n", what, *which ? " " : "", which, strerror(error));
    _exit(half_done ? 3 : error == EBUSY ? 16 : 1);
}

static char *word(void) {
    if (at >= end) { errno = EINVAL; fail("the orders are cut", ""); }
    char *found = at;
    at += strlen(at) + 1;
    return found;
}

static void read_orders(void) {
    ssize_t got = pread(ORDERS_FD, orders, sizeof orders - 1, 0);
    if (got < 1 || orders[got - 1]) { errno = EINVAL; fail("cannot read the orders", ""); }
    at = orders;
    end = orders + got;
}

static void write_map(pid_t pid, const char *name, unsigned inside, unsigned outside) {
    char path[64], line[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
    int size = snprintf(line, sizeof line, "%u %u 1\n", inside, outside), fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, line, size) != size) fail("cannot map the owner of a layer", "");
    close(fd);
}

/* A user namespace that maps one owner to another; the process in it is needed no longer than it takes to open it. */
static int mapping(const struct stat *owner, uid_t uid, gid_t gid) {
    int ready[2];
    char path[64], byte;
    if (pipe2(ready, O_CLOEXEC)) fail("cannot make a pipe", "");
    pid_t pid = fork();
    if (pid == 0) {
        if (unshare(CLONE_NEWUSER) || write(ready[1], "", 1) != 1) _exit(1);
        pause();
        _exit(0);
    }
    close(ready[1]);
    if (pid < 0 || read(ready[0], &byte, 1) != 1) fail("cannot make a user namespace", "");
    write_map(pid, "uid_map", owner->st_uid, uid);
    write_map(pid, "gid_map", owner->st_gid, gid);
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail("cannot open a user namespace", "");
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    close(ready[0]);
    return fd;
}

/* Take a folder as a mount of its own in which it belongs to the sandbox's user. */
static int taken(int source, uid_t uid, gid_t gid, struct stat *last, int *last_map) {
    struct stat owner;
    int fd = syscall(SYS_open_tree, source, "", AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (fd < 0 || fstat(source, &owner)) fail("cannot take a folder", "");
    if (owner.st_uid == uid && owner.st_gid == gid) return fd;
    if (*last_map < 0 || owner.st_uid != last->st_uid || owner.st_gid != last->st_gid) {
        if (*last_map >= 0) close(*last_map);
        *last_map = mapping(&owner, uid, gid);
        *last = owner;
    }
    struct attributes how = {.set = MOUNT_ATTR_IDMAP, .userns = *last_map};
    if (syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH, &how, sizeof how)) fail("cannot map the owner of a layer", "");
    return fd;
}

static void private_namespace(void) {
    if (unshare(CLONE_NEWNS) || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL))
        fail("cannot make a mount namespace", "");
}

static void own_folder(const char *path, const char *options) {
    if (mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, options)) fail("cannot mount a folder in memory at", path);
}

static int is_own(int userns) {
    struct stat own, other;
    return !stat("/proc/self/ns/user", &own) && !fstat(userns, &other) && own.st_dev == other.st_dev &&
           own.st_ino == other.st_ino;
}

/* Take back, of what root may, what it takes to mount, and to do with files of its own what their owner may. */
static void regain(void) {
    uint32_t wanted = 1 << CAP_SYS_ADMIN | 1 << CAP_SYS_CHROOT | 1 << CAP_DAC_OVERRIDE | 1 << CAP_FOWNER;
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2] = {{.effective = wanted, .permitted = wanted}};
    if (syscall(SYS_capset, &head, data)) fail("cannot keep the right to mount", "");
}

/* As root: put the folders where the sandbox's user can walk, and become that user. */
static void show_and_drop(const char *place, uid_t uid, gid_t gid, int shared) {
    int *mounts = calloc(sources, sizeof *mounts), map = -1;
    struct stat last;
    char path[600];
    for (int i = 0; i < sources; i++) mounts[i] = taken(FIRST_SOURCE_FD + i, uid, gid, &last, &map);
    private_namespace();
    own_folder(place, "mode=755,size=1m");
    for (int i = 0; i < sources; i++) {
        snprintf(path, sizeof path, "%s/%d", place, i);
        if (mkdir(path, 0755) || syscall(SYS_move_mount, mounts[i], "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH))
            fail("cannot show a folder at", path);
        close(mounts[i]);
        close(FIRST_SOURCE_FD + i);
    }
    snprintf(path, sizeof path, "%s/desk", place);
    if (mkdir(path, 0755)) fail("cannot make", path);
    if (prctl(PR_SET_KEEPCAPS, shared) || setgroups(0, NULL) || setresgid(gid, gid, gid) || setresuid(uid, uid, uid))
        fail("cannot become the sandbox's own user", "");
}

/* The next source, bound at `name` below the desk: short names leave room for many in one mount's options. */
static void bind_next(const char *place, const char *name) {
    char shown[600], *path = word();
    if (as_root) {
        snprintf(shown, sizeof shown, "%s/%s", place, path);
        path = shown;
    }
    if (mkdir(name, 0755) || mount(path, name, NULL, MS_BIND, NULL)) fail("cannot reach the folder", path);
}

static int detached(const char *name, uint64_t set) {
    struct attributes how = {.set = set};
    int fd = syscall(SYS_open_tree, AT_FDCWD, name, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (fd < 0 || syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH, &how, sizeof how)) fail("cannot prepare a mount", "");
    return fd;
}

/* Layers, the uppermost first, below `upper` and beside `work`: both in the one folder that was bound as u<n>. */
static int overlay(const char *place, int number, const char *upper, const char *work) {
    char options[MAX_OPTIONS], name[32];
    int count = atoi(word()), size = snprintf(options, sizeof options, "userxattr,upperdir=%s,workdir=%s,lowerdir=", upper, work);
    for (int i = 0; i < count; i++) {
        snprintf(name, sizeof name, "%d.%d", number, i);
        bind_next(place, name);
        size += snprintf(options + size, sizeof options - size, "%s%s", i ? ":" : "", name);
        if (size >= MAX_OPTIONS - 32) { errno = E2BIG; fail("a workspace has too many layers", ""); }
    }
    snprintf(name, sizeof name, "m%d", number);
    if (mkdir(name, 0755) || mount("overlay", name, "overlay", MS_NOSUID | MS_NODEV, options))
        fail("cannot mount the layers of", "a workspace");
    return detached(name, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
}

static int layered(const char *place, int number) {
    char name[16], upper[300], work[300];
    snprintf(name, sizeof name, "u%d", number);
    bind_next(place, name);
    snprintf(upper, sizeof upper, "%s/%s", name, word());
    snprintf(work, sizeof work, "%s/%s", name, word());
    return overlay(place, number, upper, work);
}

/* What is written goes to memory, at most so much, and with the sandbox. */
static int scratch(const char *place, int number) {
    char name[16], upper[32], work[32], options[64];
    snprintf(name, sizeof name, "u%d", number);
    snprintf(upper, sizeof upper, "%s/u", name);
    snprintf(work, sizeof work, "%s/w", name);
    snprintf(options, sizeof options, "mode=755,size=%s", word());
    if (mkdir(name, 0755)) fail("cannot make", name);
    own_folder(name, options);
    if (mkdir(upper, 0755) || mkdir(work, 0755)) fail("cannot make", upper);
    return overlay(place, number, upper, work);
}

static int bound(const char *place, int number, uint64_t set) {
    char name[16];
    snprintf(name, sizeof name, "b%d", number);
    bind_next(place, name);
    return detached(name, set | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
}

static int opened(int from, const char *path) {
    struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH};
    return syscall(SYS_openat2, from, path, &how, sizeof how);
}

/* Open a mount point, made if it is missing; the path starts with a slash. */
static int mount_point(int root, const char *path) {
    char parent[4096];
    int fd = opened(root, path + 1);
    if (fd >= 0 || errno != ENOENT) return fd;
    snprintf(parent, sizeof parent, "%s", path + 1);
    char *last = strrchr(parent, '/');
    if (!last) return -1;
    *last = 0;
    int above = opened(root, parent);
    if (above < 0 || mkdirat(above, last + 1, 0755)) return -1;
    close(above);
    return opened(root, path + 1);
}

/* Enter the sandbox and put the finished mounts where they belong, after what was there has been taken away. */
static void place_all(int *mounts, char **targets, int count, const char *gone) {
    if (setns(SANDBOX_FD, CLONE_NEWNS)) fail("cannot enter the sandbox", "");
    if (*gone && umount2(gone, MNT_DETACH)) fail("cannot take away", gone);
    half_done = *gone;
    int root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    for (int i = 0; i < count; i++) {
        int target = mount_point(root, targets[i]);
        if (target < 0 || syscall(SYS_move_mount, mounts[i], "", target, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH))
            fail("cannot mount at", targets[i]);
        close(target);
    }
}

int main(void) {
    int mounts[MAX_TARGETS], count = 0;
    char *targets[MAX_TARGETS], desk[600];
    read_orders();
    char *place = word();
    as_root = atoi(word());
    uid_t uid = strtoul(word(), NULL, 10);
    sources = atoi(word());
    char *gone = word();
    int owner = ioctl(SANDBOX_FD, NS_GET_USERNS), shared = owner >= 0 && is_own(owner);
    if (as_root) show_and_drop(place, uid, uid, shared);
    if (shared) regain();
    else if (owner < 0 || setns(owner, CLONE_NEWUSER)) fail("cannot enter the sandbox's user namespace", "");
    private_namespace();
    umask(0022);
    snprintf(desk, sizeof desk, as_root ? "%s/desk" : "%s", place);
    own_folder(desk, "mode=755,size=1m");
    if (chdir(desk)) fail("cannot enter", desk);
    while (at < end && count < MAX_TARGETS) {
        char *kind = word();
        targets[count] = word();
        if (!strcmp(kind, "layers")) mounts[count] = layered(place, count);
        else if (!strcmp(kind, "scratch")) mounts[count] = scratch(place, count);
        else if (!strcmp(kind, "read-only")) mounts[count] = bound(place, count, MOUNT_ATTR_RDONLY);
        else if (!strcmp(kind, "read-write")) mounts[count] = bound(place, count, 0);
        else { errno = EINVAL; fail("there is no mount of kind", kind); }
        count++;
    }
    place_all(mounts, targets, count, gone);
    return 0;
}
