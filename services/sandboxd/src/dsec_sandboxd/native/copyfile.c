/* One entry of a tree: content with its holes, owner, mode, attributes that mean something, times. */
#include "snapshot.h"

#include <limits.h>
#include <stdlib.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <linux/capability.h>

#define PIECE_BYTES (128 * 1024)
#define PAGE_BYTES 4096
#define ATTRIBUTE_BYTES_MAX 65536
#define OPAQUE "trusted.overlay.opaque"
#define ORIGIN "trusted.overlay.origin"

/* The same layout as the kernel's: linux/posix_acl_xattr.h is not installed everywhere. */
#define ACL_VERSION 2
#define ACL_NAMED_USER 0x02
#define ACL_NAMED_GROUP 0x08
struct acl_entry {
    uint16_t tag;
    uint16_t permissions;
    uint32_t id;
};

static uint32_t stored_id(const struct tree_source *source, uint32_t seen)
{
    if (!source->base_id)
        return seen;
    /* What the overlay itself made belongs to nobody inside: whiteouts, its work directory. */
    return seen - source->base_id < 65536 ? seen - source->base_id : 0;
}

static bool all_zero(const char *page)
{
    return page[0] == 0 && memcmp(page, page + 1, PAGE_BYTES - 1) == 0;
}

static int write_all(int to_fd, const char *data, size_t size, off_t at)
{
    while (size > 0) {
        ssize_t written = pwrite(to_fd, data, size, at);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return -1;
        data += written;
        at += written;
        size -= (size_t)written;
    }
    return 0;
}

/* Write a piece that has no holes of its own but may have pages of zeros. */
static int write_without_zeros(int to_fd, const char *data, size_t size, off_t at)
{
    while (size > 0) {
        size_t part = size < PAGE_BYTES ? size : PAGE_BYTES;
        if (!(part == PAGE_BYTES && all_zero(data)) && write_all(to_fd, data, part, at) < 0)
            return -1;
        data += part;
        at += (off_t)part;
        size -= part;
    }
    return 0;
}

static int copy_extent(const struct tree_source *source, int from_fd, int to_fd, off_t at, off_t end,
                       const struct tree_copy *copy)
{
    static char piece[PIECE_BYTES];

    while (at < end) {
        if (*copy->expired) {
            errno = ETIMEDOUT;
            return -1;
        }
        size_t wanted = end - at < PIECE_BYTES ? (size_t)(end - at) : PIECE_BYTES;
        ssize_t size = pread(from_fd, piece, wanted, at);
        if (size < 0 && errno == EINTR)
            continue;
        if (size < 0)
            return -1;
        if (size == 0)
            return 0; /* shorter than it was said to be */
        int result = source->dense ? write_without_zeros(to_fd, piece, (size_t)size, at)
                                   : write_all(to_fd, piece, (size_t)size, at);
        if (result < 0)
            return -1;
        at += size;
    }
    return 0;
}

static int copy_content(const struct tree_source *source, int from_fd, int to_fd, off_t size,
                        const struct tree_copy *copy)
{
    off_t at = 0;
    if (ftruncate(to_fd, size) < 0)
        return -1;
    while (at < size) {
        if (*copy->expired) {
            errno = ETIMEDOUT;
            return -1;
        }
        off_t begin = lseek(from_fd, at, SEEK_DATA);
        if (begin < 0)
            return errno == ENXIO ? 0 : -1;
        off_t end = lseek(from_fd, begin, SEEK_HOLE);
        if (end < 0)
            return -1;
        if (copy_extent(source, from_fd, to_fd, begin, end < size ? end : size, copy) < 0)
            return -1;
        at = end;
    }
    return 0;
}

/* On disk a capability belongs to id 0 of the sandbox; we see it as one of another user namespace. */
static ssize_t store_capability(const struct tree_source *source, char *value, ssize_t size)
{
    struct vfs_ns_cap_data data;
    if (size != sizeof data)
        return size;
    memcpy(&data, value, sizeof data);
    if ((data.magic_etc & VFS_CAP_REVISION_MASK) != VFS_CAP_REVISION_3 || stored_id(source, data.rootid) != 0)
        return size;
    data.magic_etc = VFS_CAP_REVISION_2 | (data.magic_etc & VFS_CAP_FLAGS_EFFECTIVE);
    memcpy(value, &data, sizeof(struct vfs_cap_data));
    return sizeof(struct vfs_cap_data);
}

static void store_acl(const struct tree_source *source, char *value, ssize_t size)
{
    struct acl_entry entry;
    for (ssize_t at = sizeof(uint32_t); at + (ssize_t)sizeof entry <= size; at += sizeof entry) {
        memcpy(&entry, value + at, sizeof entry);
        if (entry.tag == ACL_NAMED_USER || entry.tag == ACL_NAMED_GROUP)
            entry.id = stored_id(source, entry.id);
        memcpy(value + at, &entry, sizeof entry);
    }
}

static int copy_attribute(const struct tree_source *source, int from_fd, int to_fd, const char *name)
{
    static char value[ATTRIBUTE_BYTES_MAX];
    bool acl = strncmp(name, "system.posix_acl_", 17) == 0;
    bool capability = strcmp(name, "security.capability") == 0;

    /* Of what else there may be (origin, impure, a security module's) nothing is true of the copy. */
    if (!acl && !capability && strncmp(name, "user.", 5) != 0 && strcmp(name, OPAQUE) != 0)
        return 0;
    ssize_t size = fgetxattr(from_fd, name, value, sizeof value);
    if (size < 0)
        return errno == ENODATA ? 0 : -1;
    if (capability)
        size = store_capability(source, value, size);
    if (acl)
        store_acl(source, value, size);
    return fsetxattr(to_fd, name, value, (size_t)size, 0);
}

static int copy_all_attributes(const struct tree_source *source, int from_fd, int to_fd)
{
    static char names[ATTRIBUTE_BYTES_MAX];
    ssize_t size = flistxattr(from_fd, names, sizeof names);
    if (size < 0)
        return errno == ENOTSUP ? 0 : -1;
    for (ssize_t at = 0; at < size; at += (ssize_t)strlen(names + at) + 1)
        if (copy_attribute(source, from_fd, to_fd, names + at) < 0)
            return -1;
    return 0;
}

int copy_attributes(const struct tree_source *source, int from_fd, const struct stat *status, int to_fd)
{
    struct timespec times[2] = {status->st_atim, status->st_mtim};
    /* The owner first: changing it takes away capabilities and the set-id bits. */
    if (fchown(to_fd, stored_id(source, status->st_uid), stored_id(source, status->st_gid)) < 0 ||
        fchmod(to_fd, status->st_mode & 07777) < 0 || copy_all_attributes(source, from_fd, to_fd) < 0)
        return -1;
    return futimens(to_fd, times);
}

int copy_regular(const struct tree_source *source, int from_fd, const struct stat *status, int target_directory,
                 const char *name, const struct tree_copy *copy)
{
    int to_fd = openat(target_directory, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (to_fd < 0)
        return -1;
    int result = copy_content(source, from_fd, to_fd, status->st_size, copy);
    if (result == 0)
        result = copy_attributes(source, from_fd, status, to_fd);
    int saved = errno;
    close(to_fd);
    errno = saved;
    return result;
}

int copy_special(const struct tree_source *source, int source_directory, const struct stat *status,
                 int target_directory, const char *name)
{
    struct timespec times[2] = {status->st_atim, status->st_mtim};

    if (S_ISLNK(status->st_mode)) {
        static char link[PATH_MAX + 1];
        ssize_t size = readlinkat(source_directory, name, link, PATH_MAX);
        if (size < 0)
            return -1;
        link[size] = 0;
        if (symlinkat(link, target_directory, name) < 0)
            return -1;
    } else if (is_whiteout(status)) {
        return mknodat(target_directory, name, S_IFCHR, makedev(0, 0));
    } else if (S_ISFIFO(status->st_mode) || S_ISSOCK(status->st_mode)) {
        if (mknodat(target_directory, name, (status->st_mode & S_IFMT) | 0600, 0) < 0)
            return -1;
    } else {
        errno = EINVAL; /* a device: nobody inside can make one */
        return -1;
    }
    if (fchownat(target_directory, name, stored_id(source, status->st_uid), stored_id(source, status->st_gid),
                 AT_SYMLINK_NOFOLLOW) < 0)
        return -1;
    /* The name is ours and new, so nothing can be followed. */
    if (!S_ISLNK(status->st_mode) && fchmodat(target_directory, name, status->st_mode & 07777, 0) < 0)
        return -1;
    return utimensat(target_directory, name, times, AT_SYMLINK_NOFOLLOW);
}

bool is_opaque(int directory_fd)
{
    char value;
    return fgetxattr(directory_fd, OPAQUE, &value, 1) == 1 && value == 'y';
}

int mark_opaque(int directory_fd)
{
    return fsetxattr(directory_fd, OPAQUE, "y", 1, 0);
}

int mark_whiteouts(int directory_fd)
{
    return fsetxattr(directory_fd, ORIGIN, "y", 1, 0);
}
