/* What an id range keeps: a user namespace that maps mounts, and an empty network namespace. */
#include "spawner.h"

#include <net/if.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/vfs.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <linux/magic.h>

/* Freeing this much takes a millisecond or two. */
#define LARGE_LAYER_BYTES (16ULL << 20)
#define LARGE_LAYER_INODES 2000

static int write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t size = (ssize_t)strlen(text), written = write(fd, text, (size_t)size);
    int saved = errno;
    close(fd);
    errno = saved;
    return written == size ? 0 : -1;
}

int write_id_maps(pid_t pid, const char *map)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/uid_map", pid);
    if (write_file(path, map) < 0)
        return -1;
    snprintf(path, sizeof path, "/proc/%d/gid_map", pid);
    return write_file(path, map);
}

int write_oom_score(pid_t pid)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/oom_score_adj", pid);
    return write_file(path, "500");
}

/* A user namespace needs a process to be born; ours lives only until the descriptor is open. */
static int make_mapping(uint32_t base_id)
{
    char map[96], path[64];
    int namespace_fd = -1, pidfd = -1;
    struct clone_arguments arguments = {
        .flags = CLONE_NEWUSER | CLONE_PIDFD, .pidfd = (uint64_t)(uintptr_t)&pidfd, .exit_signal = SIGCHLD};
    pid_t spawner = getpid();
    pid_t pid = (pid_t)sys_clone3(&arguments);

    if (pid < 0)
        return -1;
    if (pid == 0) {
        /* Outliving us, it would keep the daemon's socket open. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != spawner)
            _exit(1);
        for (;;)
            pause();
    }
    /*
     * The second line maps the host's root, who makes the overlay and its work directory: without it the
     * overlay is silently read-only. No id inside a sandbox reaches 65536.
     */
    snprintf(map, sizeof map, "0 %u 65536\n65536 0 1\n", base_id);
    snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
    if (write_id_maps(pid, map) == 0)
        namespace_fd = open(path, O_RDONLY | O_CLOEXEC);
    int saved = errno;
    sys_pidfd_send_signal(pidfd, SIGKILL);
    close(pidfd);
    errno = saved;
    return namespace_fd < 0 ? -1 : make_long_lived(namespace_fd);
}

static int bring_loopback_up(void)
{
    struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    int result = ioctl(fd, SIOCSIFFLAGS, &request);
    int saved = errno;
    close(fd);
    errno = saved;
    return result;
}

/*
 * The namespace belongs to the host's user namespace: a sandbox's root has no NET_ADMIN or NET_RAW in it.
 * It may still listen on any port, and ping.
 */
static int make_network(int own_network_fd)
{
    int namespace_fd = -1;
    if (unshare(CLONE_NEWNET) < 0)
        return -1;
    if (bring_loopback_up() == 0 && write_file("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0") == 0 &&
        write_file("/proc/sys/net/ipv4/ping_group_range", "0 2147483647") == 0)
        namespace_fd = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    int saved = errno;
    if (setns(own_network_fd, CLONE_NEWNET) < 0) {
        close_if_open(namespace_fd);
        return -1;
    }
    errno = saved;
    return namespace_fd < 0 ? -1 : make_long_lived(namespace_fd);
}

int slot_warm(struct slot *slot, uint32_t base_id, int own_network_fd, struct failure *failure)
{
    if (!slot->mapping_fd) {
        int fd = make_mapping(base_id);
        if (fd < 0)
            return fail(failure, STEP_SLOT_USER_NAMESPACE);
        slot->mapping_fd = fd;
        slot->base_id = base_id;
    }
    if (!slot->network_fd) {
        int fd = make_network(own_network_fd);
        if (fd < 0)
            return fail(failure, STEP_SLOT_NETWORK_NAMESPACE);
        slot->network_fd = fd;
    }
    return 0;
}

/* Whether this thread's network namespace was ever connected, or its loopback device carried a packet. */
static bool network_was_used(void)
{
    char text[4096];
    unsigned long long bytes, packets;
    int fd = open("/proc/self/net/dev", O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    close_if_open(fd);
    text[size < 0 ? 0 : size] = 0;
    /* The daemon connects a sandbox by a device of this name, which goes with the namespace. */
    const char *loopback = strstr(text, "lo:");
    return !loopback || strstr(text, "eth0:") || sscanf(loopback, "lo: %llu %llu", &bytes, &packets) != 2 || packets > 0;
}

void slot_renew_network(struct slot *slot, int own_network_fd)
{
    if (!slot->network_fd)
        return;
    bool used = setns(slot->network_fd, CLONE_NEWNET) < 0 || network_was_used();
    if (setns(own_network_fd, CLONE_NEWNET) < 0)
        abort(); /* cannot fail for a process that has every capability; going on would be unsafe */
    if (used) {
        close(slot->network_fd);
        slot->network_fd = 0;
    }
}

static bool is_large(int mount_fd)
{
    struct statfs used;
    return fstatfs(mount_fd, &used) == 0 && used.f_type == TMPFS_MAGIC &&
           ((used.f_blocks - used.f_bfree) * (uint64_t)used.f_bsize > LARGE_LAYER_BYTES ||
            used.f_files - used.f_ffree > LARGE_LAYER_INODES);
}

/* Hold the mount until the spawner has closed its own descriptor of it: whoever is last has the work. */
static _Noreturn void outlive_spawners_hold(int mount_fd, int released_fd)
{
    char nothing;
    int waited = dup2(released_fd, 1), kept = dup2(mount_fd, 0);
    sys_close_range(2, ~0U, 0);
    if (kept == 0 && waited == 1 && read(waited, &nothing, 1) >= 0)
        close(kept);
    _exit(0);
}

void release_mount(int mount_fd)
{
    int ends[2] = {-1, -1};

    if (is_large(mount_fd) && pipe2(ends, O_CLOEXEC) == 0 && fork() == 0)
        outlive_spawners_hold(mount_fd, ends[0]);
    close(mount_fd);
    close_if_open(ends[0]);
    close_if_open(ends[1]);
}

void slot_release_layer(struct slot *slot)
{
    int mount_fd = slot->writable_fd;
    slot->writable_fd = 0;
    if (mount_fd)
        release_mount(mount_fd);
}
