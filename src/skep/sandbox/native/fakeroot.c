/*
 * Preloaded for commands that ask to be root: programs see uid and gid 0, or those in SKEP_UID and SKEP_GID, and may
 * "change" owners, while the kernel goes on treating them as the ordinary user they are. Every answer is made here or
 * passed to the kernel as a raw system call, so the library depends on no particular C library. Statically linked
 * programs see through it.
 */
#include <stddef.h>

typedef unsigned int id;

/* Weak: a program may come without a C library, and is root then. */
extern char **environ __attribute__((weak));

static id named(const char *name) {
    for (char **entry = &environ ? environ : NULL; entry && *entry; entry++) {
        const char *at = *entry, *letter = name;
        while (*letter && *at == *letter) at++, letter++;
        if (*letter || *at != '=') continue;
        id value = 0;
        for (at++; *at >= '0' && *at <= '9'; at++) value = value * 10 + (id)(*at - '0');
        return value;
    }
    return 0;
}

id getuid(void) { return named("SKEP_UID"); }
id geteuid(void) { return named("SKEP_UID"); }
id getgid(void) { return named("SKEP_GID"); }
id getegid(void) { return named("SKEP_GID"); }

int getresuid(id *real, id *effective, id *saved) { *real = *effective = *saved = named("SKEP_UID"); return 0; }
int getresgid(id *real, id *effective, id *saved) { *real = *effective = *saved = named("SKEP_GID"); return 0; }

int setuid(id user) { (void)user; return 0; }
int setgid(id group) { (void)group; return 0; }
int seteuid(id user) { (void)user; return 0; }
int setegid(id group) { (void)group; return 0; }
int setreuid(id real, id effective) { (void)real; (void)effective; return 0; }
int setregid(id real, id effective) { (void)real; (void)effective; return 0; }
int setresuid(id real, id effective, id saved) { (void)real; (void)effective; (void)saved; return 0; }
int setresgid(id real, id effective, id saved) { (void)real; (void)effective; (void)saved; return 0; }
int setgroups(size_t count, const id *groups) { (void)count; (void)groups; return 0; }
int initgroups(const char *user, id group) { (void)user; (void)group; return 0; }

int chown(const char *path, id user, id group) { (void)path; (void)user; (void)group; return 0; }
int lchown(const char *path, id user, id group) { (void)path; (void)user; (void)group; return 0; }
int fchown(int fd, id user, id group) { (void)fd; (void)user; (void)group; return 0; }
int fchownat(int folder, const char *path, id user, id group, int flags) {
    (void)folder; (void)path; (void)user; (void)group; (void)flags;
    return 0;
}
