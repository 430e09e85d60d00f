/*
 * Changes below a path, as inotify tells them to a process of the sandbox: the instance and its watches count
 * against the sandbox's own user, and a reader that is slow loses events of its own only.
 */
#include "file_work.h"

#include <dirent.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/inotify.h>

#define DEPTH_MAX 256
#define PATH_BYTES_MAX 4096
#define CHANGES (IN_CREATE | IN_MODIFY | IN_ATTRIB | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO)
#define ROOT_CHANGES (IN_DELETE_SELF | IN_MOVE_SELF)

struct watched {
    int number; /* inotify's, ascending */
    char *path; /* below the root; empty for the root itself */
};

struct watching {
    int stream_fd, inotify_fd;
    int root_fd; /* open only while directories are added: held, it would hide that the root was removed */
    const char *root_path;
    struct stat root;
    bool recursive;
    struct watched *directories;
    size_t count, capacity;
    struct file_result result;
};

static _Noreturn void finish(struct watching *work, int error)
{
    work->result.error = error;
    work->result.step = STEP_FILE_WATCH;
    stream_finish(work->stream_fd, work->result, NULL);
}

static void tell(struct watching *work, uint32_t mask, uint32_t cookie, const char *path)
{
    struct watch_event event = {mask, cookie};
    work->result.entries++;
    stream_frame(work->stream_fd, &event, sizeof event, path, strlen(path));
}

static struct watched *find(struct watching *work, int number)
{
    for (size_t low = 0, high = work->count; low < high;) {
        size_t middle = (low + high) / 2;
        if (work->directories[middle].number == number)
            return &work->directories[middle];
        if (work->directories[middle].number < number)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

static void join(char *target, const char *directory, const char *name)
{
    size_t length = strlen(directory), size = strlen(name);
    *target = 0;
    if (length + size + 2 > PATH_BYTES_MAX)
        return;
    memcpy(target, directory, length);
    if (length && size)
        target[length++] = '/';
    memcpy(target + length, name, size + 1);
}

/* Returns 0, or -1 with errno; ENOSPC: no more watches are allowed. A number known already gets the new path. */
static int add(struct watching *work, int fd, const char *path)
{
    if (work->count >= DSEC_WATCHES_MAX) {
        errno = ENOSPC;
        return -1;
    }
    /* A path could lead elsewhere by now; the working directory cannot. */
    if (fchdir(fd) < 0)
        return -1;
    int number = inotify_add_watch(work->inotify_fd, ".", CHANGES | ROOT_CHANGES | IN_ONLYDIR | IN_EXCL_UNLINK);
    if (number < 0)
        return -1;
    char *copy = strdup(path);
    struct watched *known = find(work, number);
    if (known && copy) {
        free(known->path);
        known->path = copy;
        return 0;
    }
    if (copy && work->count == work->capacity) {
        size_t capacity = work->capacity ? 2 * work->capacity : 64;
        struct watched *grown = realloc(work->directories, capacity * sizeof *grown);
        if (grown) {
            work->directories = grown;
            work->capacity = capacity;
        }
    }
    if (!copy || work->count == work->capacity) {
        free(copy);
        errno = ENOMEM;
        return -1;
    }
    work->directories[work->count++] = (struct watched){number, copy};
    return 0;
}

/*
 * Watch a directory and, if asked to, all below it. With news set, names found in it are told as created:
 * they may be older than the watch. Returns 0, or -1 with errno; what is gone or closed to us is no error.
 */
static int add_tree(struct watching *work, const char *path, bool news, int depth)
{
    char below[PATH_BYTES_MAX];
    struct dirent *entry;
    int result = 0;

    int fd = file_open_below(work->root_fd, path, O_RDONLY | O_DIRECTORY);
    if (fd < 0)
        return errno == EMFILE || (!*path && depth == 0) ? -1 : 0;
    if (add(work, fd, path) < 0) {
        int error = errno;
        close(fd);
        errno = error;
        return error == ENOENT || error == EACCES ? 0 : -1;
    }
    DIR *directory = work->recursive && depth < DEPTH_MAX ? fdopendir(fd) : NULL;
    if (!directory) {
        close(fd);
        return 0;
    }
    while (result == 0 && (entry = readdir(directory))) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        join(below, path, entry->d_name);
        if (!*below)
            continue;
        if (news)
            tell(work, IN_CREATE | (entry->d_type == DT_DIR ? IN_ISDIR : 0), 0, below);
        if (entry->d_type == DT_DIR)
            result = add_tree(work, below, news, depth + 1);
    }
    int error = errno;
    closedir(directory);
    errno = error;
    return result;
}

/* Add with the root open, if it is still what it was. */
static void grow(struct watching *work, const char *path, bool news)
{
    struct stat status;
    work->root_fd = open(work->root_path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (work->root_fd < 0 || fstat(work->root_fd, &status) < 0 || status.st_dev != work->root.st_dev ||
        status.st_ino != work->root.st_ino)
        finish(work, 0);
    int result = add_tree(work, path, news, *path ? 1 : 0), error = errno;
    close(work->root_fd);
    if (chdir("/") < 0 || result < 0)
        finish(work, error);
}

/* A directory moved away, or to another name: what was below it is no longer where it was. */
static void forget_tree(struct watching *work, const char *path)
{
    size_t length = strlen(path);
    for (size_t i = 0; i < work->count; i++) {
        const char *known = work->directories[i].path;
        if (strncmp(known, path, length) == 0 && (known[length] == 0 || known[length] == '/') && *known)
            inotify_rm_watch(work->inotify_fd, work->directories[i].number);
    }
}

static void forget(struct watching *work, int number)
{
    struct watched *directory = find(work, number);
    if (!directory)
        return;
    free(directory->path);
    size_t index = (size_t)(directory - work->directories);
    memmove(directory, directory + 1, (work->count - index - 1) * sizeof *directory);
    work->count--;
}

/* A file without a name (O_TMPFILE) is told as "#" and its number when it is written to, as uploads are. */
static bool is_nameless(const struct watching *work, const struct inotify_event *event, const char *path)
{
    char full[2 * PATH_BYTES_MAX];
    struct stat status;
    if (!(event->mask & (IN_MODIFY | IN_ATTRIB)) || event->len < 2 || event->name[0] != '#' ||
        event->name[1 + strspn(event->name + 1, "0123456789")])
        return false;
    snprintf(full, sizeof full, "%s/%s", work->root_path, path);
    return lstat(full, &status) < 0;
}

static void take(struct watching *work, const struct inotify_event *event)
{
    char path[PATH_BYTES_MAX];

    if (event->mask & IN_Q_OVERFLOW) {
        tell(work, IN_Q_OVERFLOW, 0, "");
        /* Directories made meanwhile are unknown; those known keep their numbers. */
        if (work->recursive)
            grow(work, "", false);
        return;
    }
    struct watched *directory = find(work, event->wd);
    if (!directory)
        return;
    if (event->mask & IN_IGNORED) {
        forget(work, event->wd);
        return;
    }
    if (event->mask & ROOT_CHANGES) {
        if (!*directory->path)
            finish(work, 0); /* what was watched is gone */
        return;
    }
    join(path, directory->path, event->len ? event->name : "");
    bool is_directory = event->mask & IN_ISDIR;
    if (event->len == 0 && *directory->path)
        return; /* the directory above tells it, too */
    if (is_nameless(work, event, path))
        return;
    if (is_directory && work->recursive && event->mask & IN_MOVED_FROM)
        forget_tree(work, path);
    tell(work, event->mask, event->cookie, path);
    if (is_directory && work->recursive && event->mask & (IN_CREATE | IN_MOVED_TO))
        grow(work, path, event->mask & IN_CREATE);
}

_Noreturn void file_watch(const struct request_view *request, struct outcome *outcome)
{
    static struct watching work;
    static char buffer[65536] __attribute__((aligned(8)));

    work.root_path = request->path;
    work.recursive = request->header->mode & FILE_MODE_RECURSIVE;
    work.root_fd = open(request->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (work.root_fd < 0 || fstat(work.root_fd, &work.root) < 0)
        file_refuse(request, STEP_FILE_WATCH, errno, outcome);
    if (!file_is_storage(work.root_fd, &work.root))
        file_refuse(request, STEP_FILE_KIND, EINVAL, outcome);
    work.inotify_fd = inotify_init1(IN_CLOEXEC);
    if (work.inotify_fd < 0)
        file_refuse(request, STEP_FILE_WATCH, errno == EMFILE ? EAGAIN : errno, outcome);
    if (add_tree(&work, "", false, 0) < 0 || chdir("/") < 0)
        file_refuse(request, STEP_FILE_WATCH, errno, outcome);
    close(work.root_fd);
    work.stream_fd = file_answer_stream(request, STEP_FILE_WATCH, -1, outcome);
    for (;;) {
        struct pollfd polled[2] = {{.fd = work.inotify_fd, .events = POLLIN}, {.fd = work.stream_fd, .events = POLLIN}};
        if (poll(polled, 2, -1) < 0)
            continue;
        if (polled[1].revents)
            _exit(0); /* nobody watches any more */
        ssize_t size = read(work.inotify_fd, buffer, sizeof buffer);
        for (ssize_t at = 0; at < size;) {
            const struct inotify_event *event = (const struct inotify_event *)(buffer + at);
            at += (ssize_t)(sizeof *event + event->len);
            take(&work, event);
        }
    }
}
