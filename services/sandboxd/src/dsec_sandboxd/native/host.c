/*
 * The tiny mount namespace. Sandboxes are born in a copy of it, so it holds only what they are made of: a
 * clean /proc (the kernel lets a user namespace mount proc only beside one that nothing covers), the
 * prepared device tree, two empty things to mask with. Copying the host's mounts would cost each sandbox
 * a microsecond and more per mount, and show them to it.
 */
#include "spawner.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
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

static int make_device_tree(void)
{
    static const struct {
        const char *name;
        unsigned major, minor;
    } nodes[] = {{"null", 1, 3}, {"zero", 1, 5}, {"full", 1, 7}, {"random", 1, 8}, {"urandom", 1, 9}, {"tty", 5, 0}};
    static const char *const links[][2] = {{"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"},
                                           {"/proc/self/fd/1", "stdout"}, {"/proc/self/fd/2", "stderr"},
                                           {"pts/ptmx", "ptmx"}};
    int tree = mount_tmpfs("0755", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC);
    if (tree < 0)
        return -1;
    for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
        if (mknodat(tree, nodes[i].name, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)) < 0 ||
            fchmodat(tree, nodes[i].name, 0666, 0) < 0)
            return -1;
    }
    for (size_t i = 0; i < sizeof links / sizeof *links; i++)
        if (symlinkat(links[i][0], tree, links[i][1]) < 0)
            return -1;
    if (mkdirat(tree, "pts", 0755) < 0 || mkdirat(tree, "shm", 0755) < 0)
        return -1;
    /* One tree for all: read-only, which does not hinder writing to the devices. */
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_RDONLY};
    if (mount_setattr(tree, "", AT_EMPTY_PATH, &attributes, sizeof attributes) < 0)
        return -1;
    return tree;
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
    static const char *const directories[] = {"new", "proc", "dev", "empty-directory"};
    for (size_t i = 0; i < sizeof directories / sizeof *directories; i++)
        if (mkdirat(root, directories[i], 0755) < 0)
            return -1;
    int empty = openat(root, "empty-file", O_CREAT | O_EXCL | O_RDONLY | O_CLOEXEC, 0444);
    if (empty < 0)
        return -1;
    close(empty);
    return 0;
}

static int enter_tree(void)
{
    int root = mount_tmpfs("0755", MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
    int devices = make_device_tree(), proc = mount_clean_proc();
    if (root < 0 || devices < 0 || proc < 0 || build_tree(root) < 0)
        return -1;
    if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
        return -1;
    if (move_mount(root, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH) < 0 || fchdir(root) < 0)
        return -1;
    /* The working directory is the new root, on top of the old one: swap them and drop the old. */
    if (sys_pivot_root(".", ".") < 0 || umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
        return -1;
    if (move_mount(devices, "", AT_FDCWD, "/dev", MOVE_MOUNT_F_EMPTY_PATH) < 0 ||
        move_mount(proc, "", AT_FDCWD, "/proc", MOVE_MOUNT_F_EMPTY_PATH) < 0)
        return -1;
    struct mount_attr attributes = {.attr_set = MOUNT_ATTR_RDONLY};
    if (mount_setattr(AT_FDCWD, "/", 0, &attributes, sizeof attributes) < 0)
        return -1;
    close(root);
    close(devices);
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
