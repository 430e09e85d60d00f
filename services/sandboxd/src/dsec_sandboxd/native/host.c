/*
 * The tiny mount namespace. Sandboxes are born in a copy of it, so it holds only what they are made of: a
 * clean /proc (the kernel lets a user namespace mount proc only beside one that nothing covers) and two empty
 * directories to mount on. Copying the host's mounts would cost each sandbox
 * a microsecond and more per mount, and show them to it.
 */
#include "spawner.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <linux/securebits.h>

#define FILTER_INSTRUCTIONS_MAX 4096

static int mount_tmpfs(const char *mode, unsigned attributes)
{
    int context = fsopen("tmpfs", FSOPEN_CLOEXEC);
    if (context < 0)
        return -1;
    int mount_fd = -1;
    if (fsconfig(context, FSCONFIG_SET_STRING, "source", "dsec", 0) == 0 &&
        fsconfig(context, FSCONFIG_SET_STRING, "mode", mode, 0) == 0 &&
        fsconfig(context, FSCONFIG_SET_STRING, "size", "4m", 0) == 0 &&
        fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
        mount_fd = fsmount(context, FSMOUNT_CLOEXEC, attributes);
    int saved = errno;
    close(context);
    errno = saved;
    return mount_fd;
}

/* Copy the program to a private mount: its file must be the host's root's, and unreadable to others. */
static int keep_init(const char *path)
{
    char buffer[65536];
    int source = open(path, O_RDONLY | O_CLOEXEC), kept = -1, copy = -1;
    int mount_fd = mount_tmpfs("0711", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    ssize_t size;

    if (source < 0 || mount_fd < 0)
        goto out;
    copy = openat(mount_fd, "init", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0700);
    if (copy < 0)
        goto out;
    while ((size = read(source, buffer, sizeof buffer)) > 0)
        if (write(copy, buffer, (size_t)size) != size)
            goto out;
    if (size < 0 || fchown(copy, 0, 0) < 0 || fchmod(copy, 0711) < 0)
        goto out;
    kept = openat(mount_fd, "init", O_PATH | O_CLOEXEC);
out:;
    int saved = errno;
    close_if_open(source);
    close_if_open(copy);
    close_if_open(mount_fd);
    errno = saved;
    return kept < 0 ? -1 : make_long_lived(kept);
}

static int mount_clean_proc(void)
{
    int context = fsopen("proc", FSOPEN_CLOEXEC);
    if (context < 0)
        return -1;
    int mount_fd = -1;
    if (fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
        mount_fd = fsmount(context, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
    int saved = errno;
    close(context);
    errno = saved;
    return mount_fd;
}

static int build_tree(int root)
{
    static const char *const directories[] = {"new", "proc", "furniture"};
    for (size_t i = 0; i < sizeof directories / sizeof *directories; i++)
        if (mkdirat(root, directories[i], 0755) < 0)
            return -1;
    return 0;
}

static int enter_tree(void)
{
    int root = mount_tmpfs("0755", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    int proc = mount_clean_proc();
    if (root < 0 || proc < 0 || build_tree(root) < 0)
        return -1;
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        return -1;
    if (move_mount(root, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH) < 0 || fchdir(root) < 0)
        return -1;
    /* The working directory is the new root, on top of the old one: swap them and drop the old. */
    if (sys_pivot_root(".", ".") < 0 || umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
        return -1;
    if (move_mount(proc, "", AT_FDCWD, "/proc", MOVE_MOUNT_F_EMPTY_PATH) < 0)
        return -1;
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_RDONLY};
    if (mount_setattr(AT_FDCWD, "/", 0, &attributes, sizeof attributes) < 0)
        return -1;
    close(root);
    close(proc);
    return 0;
}

static int read_filter(struct host *host, int filter_fd)
{
    struct stat status;
    if (fstat(filter_fd, &status) < 0)
        return -1;
    size_t size = (size_t)status.st_size, item = sizeof(struct sock_filter);
    if (size == 0 || size % item || size / item > FILTER_INSTRUCTIONS_MAX) {
        errno = EINVAL;
        return -1;
    }
    host->filter.filter = malloc(size);
    host->filter.len = (unsigned short)(size / item);
    if (!host->filter.filter || pread(filter_fd, host->filter.filter, size, 0) != (ssize_t)size)
        return -1;
    return close(filter_fd);
}

int host_prepare(struct host *host, const char *init_path, int filter_fd, struct failure *failure)
{
    umask(0);
    if (read_filter(host, filter_fd) < 0)
        return fail(failure, STEP_SECCOMP);
    host->init_fd = keep_init(init_path);
    if (host->init_fd < 0)
        return fail(failure, STEP_EXEC_INIT);
    if (enter_tree() < 0)
        return fail(failure, STEP_NAMESPACE_TREE);
    if (unshare(CLONE_NEWNET) < 0)
        return fail(failure, STEP_SLOT_NETWORK_NAMESPACE);
    int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    host->own_network_fd = own < 0 ? -1 : make_long_lived(own);
    if (host->own_network_fd < 0)
        return fail(failure, STEP_SLOT_NETWORK_NAMESPACE);
    return 0;
}
