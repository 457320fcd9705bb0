/*
 * Preloaded for every command in a gVisor sandbox. gVisor of 2022 answers "invalid argument" to a question about a
 * file that carries AT_NO_AUTOMOUNT, as those of ls and stat do. Nothing is mounted on demand in a sandbox, so the
 * flag means nothing there and is left out. The rest is the C library's own.
 */
#include <fcntl.h>
#include <stddef.h>
#include <sys/syscall.h>

#define NO_AUTOMOUNT 0x800

extern long syscall(long number, ...);

int statx(int folder, const char *path, int flags, unsigned int mask, void *answer) {
    return (int)syscall(SYS_statx, folder, path, flags & ~NO_AUTOMOUNT, mask, answer);
}

int fstatat(int folder, const char *path, void *answer, int flags) {
    return (int)syscall(SYS_newfstatat, folder, path, answer, flags & ~NO_AUTOMOUNT);
}

int fstatat64(int folder, const char *path, void *answer, int flags) {
    return (int)syscall(SYS_newfstatat, folder, path, answer, flags & ~NO_AUTOMOUNT);
}
