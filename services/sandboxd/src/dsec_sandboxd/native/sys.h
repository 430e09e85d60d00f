/* Thin names for system calls that the C library does not wrap, and two helpers every file needs. */
#ifndef DSEC_SYS_H
#define DSEC_SYS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

/* The kernel's structure, spelt here because older headers lack its last field. */
struct clone_arguments {
    uint64_t flags;
    uint64_t pidfd;
    uint64_t child_tid;
    uint64_t parent_tid;
    uint64_t exit_signal;
    uint64_t stack;
    uint64_t stack_size;
    uint64_t tls;
    uint64_t set_tid;
    uint64_t set_tid_size;
    uint64_t cgroup;
};

#ifndef CLONE_INTO_CGROUP
#define CLONE_INTO_CGROUP 0x200000000ULL
#endif
#ifndef CLOSE_RANGE_UNSHARE
#define CLOSE_RANGE_UNSHARE 2U
#endif
#ifndef CLOSE_RANGE_CLOEXEC
#define CLOSE_RANGE_CLOEXEC 4U
#endif

static inline long sys_clone3(struct clone_arguments *arguments)
{
    return syscall(SYS_clone3, arguments, sizeof *arguments);
}

static inline int sys_close_range(unsigned first, unsigned last, unsigned flags)
{
    return (int)syscall(SYS_close_range, first, last, flags);
}

static inline int sys_pivot_root(const char *root, const char *old)
{
    return (int)syscall(SYS_pivot_root, root, old);
}

static inline int sys_pidfd_send_signal(int pidfd, int signal_number)
{
    return (int)syscall(SYS_pidfd_send_signal, pidfd, signal_number, NULL, 0);
}

/* As the kernel has it. A C library neither tells of signals 32 to 34 nor sets them: they are its own. */
struct kernel_signal_action {
    uint64_t handler, flags, restorer, mask;
};

static inline int sys_signal_action(int number, const struct kernel_signal_action *action,
                                    struct kernel_signal_action *before)
{
    return (int)syscall(SYS_rt_sigaction, number, action, before, sizeof action->mask);
}

static inline void close_if_open(int fd)
{
    if (fd >= 0)
        close(fd);
}

/* Send one packet with descriptors. Returns 0, or -1 with errno. */
int packet_send(int socket_fd, const void *data, size_t size, const int *fds, int count, int flags);

/*
 * Receive one packet; descriptors are close-on-exec. Returns its size, 0 at the end of the stream,
 * -1 with errno. Of a packet that was cut short the descriptors are closed; errno is EMSGSIZE, or EMFILE when
 * our table had no room for them.
 */
ssize_t packet_receive(int socket_fd, void *data, size_t capacity, int *fds, int *count, int flags);

#endif
