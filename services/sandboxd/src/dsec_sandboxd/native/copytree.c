/*
 * Walking a tree without recursion, by descriptors alone. Depth, path length and time are bounded; room and
 * inodes are bounded by the target's file system. The source does not change meanwhile: its sandbox is frozen,
 * or it is a held layer. All the same every entry is looked at again once it is open.
 */
#include "snapshot.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>

/* A deeper tree has paths that no program can name, so no image can be made of it. */
#define DEPTH_MAX 2000
#define PATH_BYTES_MAX 4000
#define LISTING_BYTES 8192

struct level {
    int from_fd;
    int to_fd;
    bool fresh; /* the target's directory was made by this copy of this source */
    bool with_whiteouts;
    struct stat status; /* what the target is to look like: the source's, or what it looked like before */
    size_t path_bytes;
    char *listing;
    long filled, at;
};

struct listed {
    uint64_t inode;
    int64_t offset;
    unsigned short size;
    unsigned char type;
    char name[];
};

static struct level *levels;
static int depth;

static int told(const struct tree_copy *copy)
{
    return fail(copy->failure, STEP_SNAPSHOT_COPY);
}

static int refuse_tree(const struct tree_copy *copy, int error)
{
    errno = error;
    return told(copy);
}

/* Takes both descriptors, also on failure. */
static int descend(int from_fd, int to_fd, bool fresh, size_t path_bytes, const struct tree_copy *copy)
{
    struct level *level = levels + depth;
    int saved = 0;

    if (depth == DEPTH_MAX || path_bytes > PATH_BYTES_MAX)
        saved = ENAMETOOLONG;
    else if (!level->listing && !(level->listing = malloc(LISTING_BYTES)))
        saved = ENOMEM;
    else if (fstat(fresh ? from_fd : to_fd, &level->status) < 0)
        saved = errno;
    if (saved) {
        close(from_fd);
        close(to_fd);
        return refuse_tree(copy, saved);
    }
    level->from_fd = from_fd;
    level->to_fd = to_fd;
    level->fresh = fresh;
    level->with_whiteouts = false;
    level->path_bytes = path_bytes;
    level->filled = level->at = 0;
    depth++;
    return 0;
}

/* Finish the innermost directory: only now, since every entry changed its time. */
static int ascend(const struct tree_source *source, const struct tree_copy *copy)
{
    struct level *level = levels + --depth;
    int result = level->with_whiteouts ? mark_whiteouts(level->to_fd) : 0;

    if (result == 0 && level->fresh)
        result = copy_attributes(source, level->from_fd, &level->status, level->to_fd);
    else if (result == 0 && is_opaque(level->from_fd))
        result = mark_opaque(level->to_fd); /* what was hidden from the lower tree stays hidden */
    if (result == 0 && !level->fresh) {
        struct timespec times[2] = {level->status.st_atim, level->status.st_mtim};
        result = futimens(level->to_fd, times);
    }
    if (result < 0)
        told(copy);
    close(level->from_fd);
    close(level->to_fd);
    return result;
}

static int copy_directory(int from_fd, const char *name, size_t path_bytes, bool make, const struct level *level,
                          const struct tree_copy *copy)
{
    if (make && mkdirat(level->to_fd, name, 0700) < 0) {
        close(from_fd);
        return told(copy);
    }
    int to_fd = openat(level->to_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (to_fd < 0) {
        close(from_fd);
        return told(copy);
    }
    return descend(from_fd, to_fd, make, path_bytes, copy);
}

/* A file that has other names: the first one is also kept beside the copy, the others become links to it. */
static int copy_linked(const struct tree_source *source, int from_fd, const struct stat *status,
                       const struct level *level, const char *name, const struct tree_copy *copy)
{
    char known[32];
    snprintf(known, sizeof known, "%llu", (unsigned long long)status->st_ino);
    if (linkat(copy->links_fd, known, level->to_fd, name, 0) == 0)
        return 0;
    if (errno != ENOENT)
        return -1;
    int result = from_fd >= 0 ? copy_regular(source, from_fd, status, level->to_fd, name, copy)
                              : copy_special(source, level->from_fd, status, level->to_fd, name);
    return result < 0 ? -1 : linkat(level->to_fd, name, copy->links_fd, known, 0);
}

static uint64_t hole_bytes(const struct stat *status)
{
    uint64_t held = (uint64_t)status->st_blocks * 512, size = (uint64_t)status->st_size;
    return size > held ? size - held : 0;
}

static int count_holes(int directory, const char *name, struct tree_copy *copy)
{
    struct stat status;

    if (fstatat(directory, name, &status, AT_SYMLINK_NOFOLLOW) < 0)
        return -1;
    /* A file with several names counts once, at the first, which is beside the copy as well. */
    if (status.st_nlink <= 2 && __builtin_add_overflow(copy->hole_bytes, hole_bytes(&status), &copy->hole_bytes))
        copy->hole_bytes = UINT64_MAX;
    return 0;
}

static int copy_new(const struct tree_source *source, const char *name, const struct stat *seen,
                    struct level *level, struct tree_copy *copy)
{
    size_t path_bytes = level->path_bytes + strlen(name) + 1;
    bool directory = S_ISDIR(seen->st_mode), regular = S_ISREG(seen->st_mode), linked = seen->st_nlink > 1;
    struct stat status = *seen;
    int from_fd = -1;

    if (directory || regular) {
        int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOATIME | O_CLOEXEC | (directory ? O_DIRECTORY : 0);
        from_fd = openat(level->from_fd, name, flags);
        if (from_fd < 0 || fstat(from_fd, &status) < 0) {
            told(copy);
            close_if_open(from_fd);
            return -1;
        }
        if (status.st_ino != seen->st_ino || (status.st_mode & S_IFMT) != (seen->st_mode & S_IFMT)) {
            close(from_fd);
            return refuse_tree(copy, ESTALE);
        }
    }
    if (directory)
        return copy_directory(from_fd, name, path_bytes, true, level, copy);
    int result;
    if (path_bytes > PATH_BYTES_MAX) {
        errno = ENAMETOOLONG;
        result = -1;
    } else if (linked && !is_whiteout(&status)) {
        result = copy_linked(source, from_fd, &status, level, name, copy);
    } else if (regular) {
        result = copy_regular(source, from_fd, &status, level->to_fd, name, copy);
    } else {
        result = copy_special(source, level->from_fd, &status, level->to_fd, name);
    }
    level->with_whiteouts |= is_whiteout(&status);
    if (regular && result == 0 && (source->dense || hole_bytes(&status) > 0))
        result = count_holes(level->to_fd, name, copy);
    if (result < 0)
        told(copy);
    close_if_open(from_fd);
    return result;
}

/* The target has this name already, from a tree above: it hides ours, but for the inside of directories. */
static int merge(const char *name, const struct stat *seen, const struct stat *standing, const struct level *level,
                 const struct tree_copy *copy)
{
    if (!S_ISDIR(standing->st_mode))
        return 0;
    int to_fd = openat(level->to_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (to_fd < 0)
        return told(copy);
    int result = 0;
    if (is_opaque(to_fd)) {
        close(to_fd);
        return 0;
    }
    if (!S_ISDIR(seen->st_mode)) {
        /* Ours is no directory, so what lies below ours was hidden from the one above, too. */
        result = mark_opaque(to_fd) < 0 ? told(copy) : 0;
        close(to_fd);
        return result;
    }
    close(to_fd);
    int from_fd = openat(level->from_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NOATIME | O_CLOEXEC);
    if (from_fd < 0)
        return told(copy);
    return copy_directory(from_fd, name, level->path_bytes + strlen(name) + 1, false, level, copy);
}

static int copy_entry(const struct tree_source *source, const char *name, struct tree_copy *copy)
{
    struct level *level = levels + depth - 1;
    struct stat seen, standing;

    if (*copy->expired)
        return refuse_tree(copy, ETIMEDOUT);
    copy->entries++;
    if (fstatat(level->from_fd, name, &seen, AT_SYMLINK_NOFOLLOW) < 0)
        return told(copy);
    if (!level->fresh) {
        if (fstatat(level->to_fd, name, &standing, AT_SYMLINK_NOFOLLOW) == 0)
            return merge(name, &seen, &standing, level, copy);
        if (errno != ENOENT)
            return told(copy);
    }
    return copy_new(source, name, &seen, level, copy);
}

/* Returns the next name but `.` and `..`, NULL with errno 0 at the end. */
static const char *next_name(struct level *level)
{
    for (;;) {
        if (level->at >= level->filled) {
            level->at = 0;
            errno = 0;
            level->filled = syscall(SYS_getdents64, level->from_fd, level->listing, LISTING_BYTES);
            if (level->filled <= 0) {
                if (level->filled == 0)
                    errno = 0;
                level->filled = 0;
                return NULL;
            }
        }
        const struct listed *entry = (const struct listed *)(level->listing + level->at);
        level->at += entry->size;
        if (strcmp(entry->name, ".") != 0 && strcmp(entry->name, "..") != 0)
            return entry->name;
    }
}

static int forget_links(const struct tree_copy *copy)
{
    int again = openat(copy->links_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = again < 0 ? NULL : fdopendir(again);
    struct dirent *entry;
    int result = directory ? 0 : told(copy);

    while (directory && result == 0 && (entry = readdir(directory)))
        if (entry->d_name[0] != '.' && unlinkat(copy->links_fd, entry->d_name, 0) < 0)
            result = told(copy);
    if (directory)
        closedir(directory);
    return result;
}

int copy_tree(const struct tree_source *source, int target_fd, bool target_is_fresh, struct tree_copy *copy)
{
    if (!levels && !(levels = calloc(DEPTH_MAX, sizeof *levels)))
        return told(copy);
    int from_fd = openat(source->root_fd, ".", O_RDONLY | O_DIRECTORY | O_NOATIME | O_CLOEXEC);
    int to_fd = openat(target_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (from_fd < 0 || to_fd < 0)
        return told(copy);
    depth = 0;
    if (descend(from_fd, to_fd, target_is_fresh, 0, copy) < 0)
        return -1;
    while (depth > 0) {
        const char *name = next_name(levels + depth - 1);
        if (name ? copy_entry(source, name, copy) : errno ? told(copy) : ascend(source, copy))
            return -1;
    }
    return forget_links(copy);
}
