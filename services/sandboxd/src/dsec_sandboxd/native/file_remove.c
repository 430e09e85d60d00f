/*
 * Remove a tree, for a bounded time: whoever asked goes on by asking again. No link is followed, no other
 * mount is entered, and a tree of any depth needs a bounded number of descriptors.
 */
#include "file_work.h"

#include <dirent.h>
#include <limits.h>
#include <stdlib.h>
#include <time.h>

#define OPEN_LEVELS_MAX 64

struct level {
    int fd; /* -1 below the first OPEN_LEVELS_MAX: found again by "..", and compared */
    dev_t device;
    ino_t inode;
    char name[NAME_MAX + 1]; /* of the directory in the level above */
};

struct removal {
    struct level *levels;
    size_t depth, capacity;
    int fd; /* of the deepest level */
    uint64_t removed;
    struct timespec end;
};

static bool is_over(const struct removal *removal)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec > removal->end.tv_sec ||
           (now.tv_sec == removal->end.tv_sec && now.tv_nsec >= removal->end.tv_nsec);
}

static int descend(struct removal *removal, int from_fd, const char *name)
{
    struct stat status;
    int fd = file_open_below(from_fd, name, O_RDONLY | O_DIRECTORY);
    if (fd < 0)
        return -1;
    if (fstat(fd, &status) < 0 || strlen(name) > NAME_MAX) {
        close(fd);
        return -1;
    }
    if (removal->depth == removal->capacity) {
        size_t capacity = removal->capacity ? 2 * removal->capacity : 64;
        struct level *levels = realloc(removal->levels, capacity * sizeof *levels);
        if (!levels) {
            close(fd);
            errno = ENOMEM;
            return -1;
        }
        removal->levels = levels;
        removal->capacity = capacity;
    }
    if (removal->depth > OPEN_LEVELS_MAX) {
        close(removal->fd);
        removal->levels[removal->depth - 1].fd = -1;
    }
    struct level *level = &removal->levels[removal->depth++];
    *level = (struct level){.fd = fd, .device = status.st_dev, .inode = status.st_ino};
    strcpy(level->name, name);
    removal->fd = fd;
    return 0;
}

/* Leave the deepest level and remove it. Not empty again means that somebody fills it: it is entered anew. */
static int ascend(struct removal *removal)
{
    struct stat status;
    struct level left = removal->levels[removal->depth - 1], *above = &removal->levels[removal->depth - 2];
    if (above->fd < 0) {
        above->fd = openat(removal->fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (above->fd < 0)
            return -1;
        if (fstat(above->fd, &status) < 0 || status.st_dev != above->device || status.st_ino != above->inode) {
            errno = ESTALE; /* it was moved away meanwhile */
            return -1;
        }
    }
    close(removal->fd);
    removal->depth--;
    removal->fd = above->fd;
    if (unlinkat(removal->fd, left.name, AT_REMOVEDIR) == 0)
        removal->removed++;
    else if (errno != ENOENT && errno != ENOTEMPTY && errno != EEXIST)
        return -1;
    return 0;
}

/* Remove one name. Returns 1 when a level was entered. */
static int remove_entry(struct removal *removal, const struct dirent64 *entry)
{
    if (entry->d_type != DT_DIR) {
        if (unlinkat(removal->fd, entry->d_name, 0) == 0) {
            removal->removed++;
            return 0;
        }
        if (errno == ENOENT)
            return 0;
        if (errno != EISDIR)
            return -1;
    }
    if (unlinkat(removal->fd, entry->d_name, AT_REMOVEDIR) == 0) {
        removal->removed++;
        return 0;
    }
    if (errno == ENOENT)
        return 0;
    if (errno != ENOTEMPTY && errno != EEXIST)
        return -1;
    return descend(removal, removal->fd, entry->d_name) == 0 || errno == ENOENT ? 1 : -1;
}

/* Empty the first level. Returns 0 when it is empty, 1 when the time was over, -1 with errno. */
static int empty(struct removal *removal)
{
    static char buffer[32768] __attribute__((aligned(8)));
    for (;;) {
        bool found = false, entered = false;
        ssize_t size;
        if (lseek(removal->fd, 0, SEEK_SET) < 0)
            return -1;
        while (!entered && (size = syscall(SYS_getdents64, removal->fd, buffer, sizeof buffer)) > 0) {
            for (ssize_t at = 0; at < size && !entered;) {
                const struct dirent64 *entry = (const struct dirent64 *)(buffer + at);
                at += entry->d_reclen;
                if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
                    continue;
                found = true;
                if (is_over(removal))
                    return 1;
                int result = remove_entry(removal, entry);
                if (result < 0)
                    return -1;
                entered = result == 1;
            }
        }
        if (!entered && size < 0)
            return -1;
        if (found)
            continue;
        if (removal->depth == 1)
            return 0;
        if (ascend(removal) < 0)
            return -1;
    }
}

_Noreturn void file_remove(const struct request_view *request, struct outcome *outcome)
{
    struct control_reply reply = {0};
    struct removal removal = {.fd = -1};
    char *name;

    clock_gettime(CLOCK_MONOTONIC, &removal.end);
    removal.end.tv_sec += request->header->mode / 1000;
    removal.end.tv_nsec += (long)(request->header->mode % 1000) * 1000000;
    if (removal.end.tv_nsec >= 1000000000) {
        removal.end.tv_sec++;
        removal.end.tv_nsec -= 1000000000;
    }
    int parent_fd = file_open_parent(request->path, &name);
    if (parent_fd < 0)
        file_refuse(request, STEP_FILE_REMOVE, errno, outcome);
    if (unlinkat(parent_fd, name, 0) == 0) {
        reply.size_bytes = 1;
        file_answer(request, &reply, -1, outcome);
    }
    if (errno != EISDIR)
        file_refuse(request, STEP_FILE_REMOVE, errno, outcome);
    if (descend(&removal, parent_fd, name) < 0)
        file_refuse(request, STEP_FILE_REMOVE, errno, outcome);
    int result = empty(&removal);
    if (result < 0)
        file_refuse(request, STEP_FILE_REMOVE, errno, outcome);
    reply.status = result;
    if (result == 0) {
        if (unlinkat(parent_fd, name, AT_REMOVEDIR) == 0)
            removal.removed++;
        else if (errno == ENOTEMPTY || errno == EEXIST)
            reply.status = 1; /* somebody fills it */
        else if (errno != ENOENT)
            file_refuse(request, STEP_FILE_REMOVE, errno, outcome);
    }
    reply.size_bytes = removal.removed;
    file_answer(request, &reply, -1, outcome);
}
