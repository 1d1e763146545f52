/* Loaded before the C library (LD_PRELOAD): calls that change files below a folder fail when they are told to, or are
 * written down with their bytes, so that what a loss of power may leave can be built. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[PATH_MAX], word[256];
static long fail_at, done;
static int code, for_good, record = -1;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static __thread int inside;

/* The nth call for a path with the word in it fails with this code; for good: and so do all behind it. 0: none fails. */
void disk_calls_arm(const char *below, const char *with, long nth, int error, int good) {
    snprintf(folder, sizeof folder, "%s", below), snprintf(word, sizeof word, "%s", with);
    done = 0, fail_at = nth, code = error, for_good = good;
}
long disk_calls_done(void) { return done; }
void disk_calls_record(const char *below, int to) { snprintf(folder, sizeof folder, "%s", below), record = to; }

static const char *path_at(int at, const char *name, char *path) {
    char link[64];
    if (name && name[0] == '/') return name;
    snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    ssize_t n = readlink(at == AT_FDCWD ? "/proc/self/cwd" : link, path, PATH_MAX - 1);
    if (n < 0) return "";
    path[n] = 0;
    if (name) snprintf(path + n, PATH_MAX - n, "/%s", name);
    return path;
}
static int is_ours(const char *path) { return folder[0] && !strncmp(path, folder, strlen(folder)); }
static int fails(const char *path) {
    if (!is_ours(path) || !strstr(path, word)) return 0;
    long n = __sync_add_and_fetch(&done, 1);
    if (!fail_at || n < fail_at || (n > fail_at && !for_good)) return 0;
    errno = code;
    return 1;
}
/* what; the lengths of path, other path and data; an offset; then these three */
static void note(char what, const char *path, const char *other, off64_t at, const void *data, size_t size) {
    struct { int64_t what, path, other, at, size; } head = {what, strlen(path), strlen(other), at, size};
    ssize_t put = write(record, &head, sizeof head) + write(record, path, head.path) +
                  write(record, other, head.other) + (size ? write(record, data, size) : 0);
    (void)put;
}
#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
/* does it under the lock, so that the notes are in the order in which things were done */
#define DO(path, failed, call, is_noted, ...)                                             \
    if (inside || !is_ours(path)) return call;                                            \
    inside = 1;                                                                           \
    if (fails(path)) { int e = errno; failed; errno = e; inside = 0; return -1; }         \
    if (record >= 0) pthread_mutex_lock(&turn);                                           \
    ssize_t result = call;                                                                \
    int e = errno;                                                                        \
    if (record >= 0) { if (result >= 0 && (is_noted)) note(__VA_ARGS__); pthread_mutex_unlock(&turn); } \
    errno = e, inside = 0;                                                                \
    return result

static off64_t where(int fd) { return fcntl(fd, F_GETFL) & O_APPEND ? -1 : lseek64(fd, 0, SEEK_CUR); }

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    char buffer[PATH_MAX];
    if (inside || !folder[0]) return real(fd, data, size);
    const char *path = path_at(fd, 0, buffer);
    off64_t at = is_ours(path) ? where(fd) : 0;
    DO(path, real(fd, data, size / 2), real(fd, data, size), 1, 'w', path, "", at, data, result);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    char buffer[PATH_MAX];
    if (inside || !folder[0]) return real(fd, data, size, at);
    const char *path = path_at(fd, 0, buffer);
    DO(path, real(fd, data, size / 2, at), real(fd, data, size, at), 1, 'w', path, "", at, data, result);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return pwrite64(fd, data, size, at); }
int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    char buffer[PATH_MAX];
    const char *path = folder[0] ? path_at(fd, 0, buffer) : "";
    DO(path, , real(fd, size), 1, 't', path, "", size, "", 0);
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
#define SYNC(name)                                                        \
    int name(int fd) {                                                    \
        REAL(name);                                                       \
        char buffer[PATH_MAX];                                            \
        const char *path = folder[0] ? path_at(fd, 0, buffer) : "";       \
        DO(path, , real(fd), 1, 's', path, "", 0, "", 0);                 \
    }
SYNC(fsync)
SYNC(fdatasync)
int rename(const char *from, const char *to) {
    REAL(rename);
    char a[PATH_MAX], b[PATH_MAX];
    const char *path = path_at(AT_FDCWD, from, a), *other = path_at(AT_FDCWD, to, b);
    DO(path, , real(from, to), 1, 'r', path, other, 0, "", 0);
}
int unlinkat(int at, const char *name, int flags) {
    REAL(unlinkat);
    char buffer[PATH_MAX];
    const char *path = path_at(at, name, buffer);
    DO(path, , real(at, name, flags), 1, 'u', path, "", 0, "", 0);
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
int mkdirat(int at, const char *name, mode_t mode) {
    REAL(mkdirat);
    char buffer[PATH_MAX];
    const char *path = path_at(at, name, buffer);
    DO(path, , real(at, name, mode), 1, 'm', path, "", 0, "", 0);
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
static int opened(int at, const char *name, int flags, mode_t mode) {
    static int (*real)(int, const char *, int, ...);
    if (!real) real = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat64");
    char buffer[PATH_MAX];
    if (inside || !folder[0] || !(flags & (O_CREAT | O_TRUNC))) return real(at, name, flags, mode);
    const char *path = path_at(at, name, buffer);
    struct stat found;
    int is_new = stat(path, &found) != 0;
    DO(path, , real(at, name, flags, mode), is_new || (flags & O_TRUNC), is_new ? 'c' : 't', path, "", 0, "", 0);
}
#define MODE va_list more; va_start(more, flags); mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0; va_end(more)
int open(const char *name, int flags, ...) { MODE; return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE; return opened(AT_FDCWD, name, flags, mode); }
int openat(int at, const char *name, int flags, ...) { MODE; return opened(at, name, flags, mode); }
int openat64(int at, const char *name, int flags, ...) { MODE; return opened(at, name, flags, mode); }
