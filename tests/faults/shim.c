/* LD_PRELOAD library that counts the system calls that modify files in one directory, and at a given call kills
 * the process, returns an error, or records the call.
 * Built and loaded (LD_PRELOAD) by the fault tests; nothing happens until fault_arm is called. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum action { COUNT, KILL, FAIL_ONCE, FAIL_FROM };
enum kind { DATA = 1, SYNC = 2, NAME = 4, REMOVE = 8 };

static char folder[PATH_MAX], trace[1 << 20];
static size_t trace_size;
static long calls, target_call;
static int action, error, kinds;

void fault_arm(const char *below, long at, int what, int code, int which) {
    trace_size = 0;
    trace[0] = calls = 0;
    target_call = at;
    action = what;
    error = code;
    kinds = which;
    snprintf(folder, sizeof folder, "%s", below);
}

void fault_disarm(void) { folder[0] = 0; }
long fault_calls(void) { return calls; }
const char *fault_trace(void) { return trace; }

static void path_of(int handle, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    out[length < 0 ? 0 : length] = 0;
}

static void path_at(int handle, const char *name, char *out) {
    char base[PATH_MAX] = "";
    if (name[0] == '/' || handle == AT_FDCWD) {
        snprintf(out, PATH_MAX, "%s", name);
        return;
    }
    path_of(handle, base);
    snprintf(out, PATH_MAX, "%.2000s/%.2000s", base, name);
}

/* Whether this call is the target call and has to fail. `torn` is data of which half is written before a kill. */
static int hit(enum kind kind, const char *call, const char *path, const char *to, int handle, const void *torn,
               size_t size) {
    if (!folder[0] || strncmp(path, folder, strlen(folder)) != 0 || !(kind & kinds))
        return 0;
    calls++;
    if (trace_size < sizeof trace - 2 * PATH_MAX)
        trace_size += snprintf(trace + trace_size, sizeof trace - trace_size, "%s\t%s\t%s\n", call, path, to ? to : "");
    if (action == KILL && calls == target_call) {
        static ssize_t (*real)(int, const void *, size_t);
        real = dlsym(RTLD_NEXT, "write");
        if (torn && size > 1 && real(handle, torn, size / 2) < 0)
            errno = 0;
        kill(getpid(), SIGKILL);
        pause();
    }
    return (action == FAIL_ONCE && calls == target_call) || (action == FAIL_FROM && calls >= target_call);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define FAIL() do { errno = error; return -1; } while (0)

#define ON_HANDLE(kind, result, name, params, arguments, torn, size) \
    result name params { \
        REAL(name); \
        char path[PATH_MAX]; \
        if (folder[0]) { \
            path_of(handle, path); \
            if (hit(kind, #name, path, NULL, handle, torn, size)) FAIL(); \
        } \
        return real arguments; \
    }

ON_HANDLE(DATA, ssize_t, write, (int handle, const void *data, size_t size), (handle, data, size), data, size)
ON_HANDLE(DATA, ssize_t, pwrite, (int handle, const void *data, size_t size, off_t at), (handle, data, size, at), NULL, 0)
ON_HANDLE(DATA, ssize_t, pwrite64, (int handle, const void *data, size_t size, off64_t at), (handle, data, size, at), NULL, 0)
ON_HANDLE(DATA, ssize_t, writev, (int handle, const struct iovec *parts, int count), (handle, parts, count), NULL, 0)
ON_HANDLE(DATA, int, ftruncate, (int handle, off_t size), (handle, size), NULL, 0)
ON_HANDLE(DATA, int, ftruncate64, (int handle, off64_t size), (handle, size), NULL, 0)
ON_HANDLE(SYNC, int, fsync, (int handle), (handle), NULL, 0)
ON_HANDLE(SYNC, int, fdatasync, (int handle), (handle), NULL, 0)

#define ON_PATH(kind, name, params, arguments, base, given) \
    int name params { \
        REAL(name); \
        char path[PATH_MAX]; \
        path_at(base, given, path); \
        if (hit(kind, #name, path, NULL, -1, NULL, 0)) FAIL(); \
        return real arguments; \
    }

ON_PATH(NAME, mkdir, (const char *name, mode_t mode), (name, mode), AT_FDCWD, name)
ON_PATH(NAME, mkdirat, (int base, const char *name, mode_t mode), (base, name, mode), base, name)
ON_PATH(REMOVE, unlink, (const char *name), (name), AT_FDCWD, name)
ON_PATH(REMOVE, unlinkat, (int base, const char *name, int flags), (base, name, flags), base, name)
ON_PATH(REMOVE, rmdir, (const char *name), (name), AT_FDCWD, name)

#define ON_RENAME(name, params, arguments, base, given, target, new) \
    int name params { \
        REAL(name); \
        char path[PATH_MAX], to[PATH_MAX]; \
        path_at(base, given, path); \
        path_at(target, new, to); \
        if (hit(NAME, #name, path, to, -1, NULL, 0)) FAIL(); \
        return real arguments; \
    }

ON_RENAME(rename, (const char *old, const char *new), (old, new), AT_FDCWD, old, AT_FDCWD, new)
ON_RENAME(renameat, (int from, const char *old, int to_, const char *new), (from, old, to_, new), from, old, to_, new)
ON_RENAME(renameat2, (int from, const char *old, int to_, const char *new, unsigned flags), (from, old, to_, new, flags),
          from, old, to_, new)

#define ON_OPEN(name, params, arguments, base, given) \
    int name params { \
        REAL(name); \
        mode_t mode = 0; \
        if (flags & O_CREAT) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
            char path[PATH_MAX]; \
            path_at(base, given, path); \
            if (hit(NAME, #name, path, NULL, -1, NULL, 0)) FAIL(); \
        } \
        return real arguments; \
    }

ON_OPEN(open, (const char *name, int flags, ...), (name, flags, mode), AT_FDCWD, name)
ON_OPEN(open64, (const char *name, int flags, ...), (name, flags, mode), AT_FDCWD, name)
ON_OPEN(openat, (int base, const char *name, int flags, ...), (base, name, flags, mode), base, name)
ON_OPEN(openat64, (int base, const char *name, int flags, ...), (base, name, flags, mode), base, name)
