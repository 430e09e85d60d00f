/*
 * The spawner: creates sandboxes for one daemon, so that nothing forks from the Python process.
 *
 *   spawner SOCKET_FD INIT_PATH FILTER_FD
 *
 * It answers one request at a time and ends with its daemon (end of file on the socket, or the daemon's
 * death). Sandboxes live on: their control sockets are their own.
 */
#include "spawner.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <linux/securebits.h>

#define CHILD_TIMEOUT_MS 10000

static struct host host;
static struct slot slots[DSEC_SLOTS_MAX];
static int layers[DSEC_LAYER_HANDLES];

int fail(struct failure *failure, enum dsec_step step)
{
    failure->step = step;
    failure->error = errno ? errno : EIO;
    return -1;
}

int make_long_lived(int fd)
{
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, LONG_LIVED_FD_MIN);
    int saved = errno;
    close(fd);
    errno = saved;
    return moved;
}

static int refuse(struct failure *failure, int error)
{
    errno = error;
    return fail(failure, STEP_PROTOCOL);
}

static int hold(const struct spawner_request *request, const int *fds, int count, struct failure *failure)
{
    if (request->layer >= DSEC_LAYER_HANDLES || count != 1)
        return refuse(failure, EINVAL);
    if (layers[request->layer])
        return refuse(failure, EEXIST);
    int mount_fd = mount_layer(fds[0], failure);
    if (mount_fd < 0)
        return -1;
    mount_fd = make_long_lived(mount_fd);
    if (mount_fd < 0)
        return fail(failure, STEP_LAYER_MOUNT);
    layers[request->layer] = mount_fd;
    return 0;
}

static int drop(const struct spawner_request *request, struct failure *failure)
{
    if (request->layer >= DSEC_LAYER_HANDLES)
        return refuse(failure, EINVAL);
    if (layers[request->layer])
        close(layers[request->layer]);
    layers[request->layer] = 0;
    return 0;
}

static int check_slot(const struct spawner_request *request, struct failure *failure)
{
    /* Ids of the host itself (below 65536) must never be given away. */
    if (request->slot >= DSEC_SLOTS_MAX || request->base_id < 65536 || request->base_id > UINT32_MAX - 131072)
        return refuse(failure, EINVAL);
    struct slot *slot = &slots[request->slot];
    if (slot->mapping_fd && slot->base_id != request->base_id)
        return refuse(failure, EEXIST);
    return 0;
}

static int check_create(const struct spawner_request *request, int *layer_fds, int count, struct failure *failure)
{
    if (check_slot(request, failure) < 0)
        return -1;
    int with_run = request->flags & CREATE_HAS_RUN_MOUNT ? 1 : 0;
    if (request->layer_count < 1 || request->layer_count > DSEC_LAYERS_MAX ||
        request->controller_count > DSEC_CONTROLLERS_MAX ||
        count != 1 + (int)request->controller_count + with_run ||
        !memchr(request->hostname, 0, sizeof request->hostname) || !request->disk_bytes || !request->inodes)
        return refuse(failure, EINVAL);
    for (uint32_t i = 0; i < request->layer_count; i++) {
        if (request->layers[i] >= DSEC_LAYER_HANDLES || !layers[request->layers[i]])
            return refuse(failure, ENOENT);
        layer_fds[i] = layers[request->layers[i]];
    }
    if (slots[request->slot].writable_fd)
        return refuse(failure, EBUSY);
    return 0;
}

/* Clone into every namespace and the v2 cgroup, with the sandbox's base id as the effective one. */
static pid_t clone_child(const struct child_plan *plan, const struct slot *slot, int cgroup_fd, int *pidfd,
                         struct failure *failure)
{
    struct clone_arguments arguments = {
        .flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_PIDFD |
                 CLONE_FILES | CLONE_INTO_CGROUP,
        .pidfd = (uint64_t)(uintptr_t)pidfd,
        .exit_signal = SIGCHLD,
        .cgroup = (uint64_t)cgroup_fd,
    };
    if (setns(slot->network_fd, CLONE_NEWNET) < 0) {
        fail(failure, STEP_ENTER_NETWORK_NAMESPACE);
        return -1;
    }
    /*
     * The user namespace's owner pays for its inotify instances, mounts and so on: were it root, one
     * sandbox could use up the whole node's. SECBIT_NO_SETUID_FIXUP keeps our capabilities.
     */
    pid_t pid = -1;
    if (syscall(SYS_setresuid, -1, slot->base_id, -1) < 0) {
        fail(failure, STEP_CLONE);
    } else {
        pid = (pid_t)sys_clone3(&arguments);
        if (pid == 0)
            child_main(plan);
        if (pid < 0)
            fail(failure, STEP_CLONE);
    }
    /* Neither can fail for a process that has every capability; if one did, going on would be unsafe. */
    if (syscall(SYS_setresuid, -1, 0, -1) < 0 || setns(host.own_network_fd, CLONE_NEWNET) < 0)
        abort();
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a change of identity forgets it */
    return pid;
}

/*
 * Wait until the child has spoken or is dead. Its end of the socket is open in our table too, so that a child
 * killed before its first word (by the memory limit, say) would not end the wait, and nothing could be created
 * any more.
 */
static int wait_for_child(int host_end, int pidfd)
{
    struct pollfd polled[2] = {{.fd = host_end, .events = POLLIN}, {.fd = pidfd, .events = POLLIN}};
    int count;
    do
        count = poll(polled, 2, CHILD_TIMEOUT_MS);
    while (count < 0 && errno == EINTR);
    if (count > 0 && polled[0].revents & POLLIN)
        return 0;
    if (count >= 0)
        errno = count ? ECHILD : ETIMEDOUT;
    return -1;
}

/* Let the child go on once its ids are mapped and its root is made. */
static int release_child(const struct spawner_request *request, const int *layer_fds, const struct slot *slot,
                         pid_t pid, int pidfd, int host_end, int run_fd, struct sandbox_mounts *mounts,
                         struct failure *failure)
{
    char map[64];
    snprintf(map, sizeof map, "0 %u 65536\n", slot->base_id);
    if (write_id_maps(pid, map) < 0)
        return fail(failure, STEP_ID_MAP);
    if (write_oom_score(pid) < 0)
        return fail(failure, STEP_OOM_SCORE);
    if (mount_root(request, layer_fds, slot->mapping_fd, mounts, failure) < 0)
        return -1;
    int fds[3] = {mounts->overlay_fd, mounts->shared_fd, run_fd};
    struct control_reply ready;
    int none[DSEC_DESCRIPTORS_MAX], count;
    if (wait_for_child(host_end, pidfd) < 0)
        return fail(failure, STEP_HANDSHAKE);
    /* The child's table is its own from here on, so that ours may be closed. */
    ssize_t size = packet_receive(host_end, &ready, sizeof ready, none, &count, 0);
    if (size != sizeof ready)
        return fail(failure, STEP_HANDSHAKE);
    if (ready.error) {
        errno = ready.error;
        return fail(failure, (enum dsec_step)ready.step);
    }
    if (packet_send(host_end, "g", 1, fds, run_fd >= 0 ? 3 : 2, 0) < 0)
        return fail(failure, STEP_HANDSHAKE);
    return 0;
}

static int create(const struct spawner_request *request, const int *fds, int count,
                  struct spawner_reply *reply, int *reply_fds, struct failure *failure)
{
    int layer_fds[DSEC_LAYERS_MAX];
    int ends[2] = {-1, -1}, pidfd = -1;
    struct sandbox_mounts mounts = {-1, -1, -1};

    if (check_create(request, layer_fds, count, failure) < 0)
        return -1;
    struct slot *slot = &slots[request->slot];
    if (slot_warm(slot, request->base_id, host.own_network_fd, failure) < 0)
        return -1;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
        return fail(failure, STEP_CONTROL_SOCKET);

    struct child_plan plan = {&host, request, ends[0], ends[1], fds + 1};
    pid_t pid = clone_child(&plan, slot, fds[0], &pidfd, failure);
    int result = -1;
    if (pid > 0) {
        int run_fd = request->flags & CREATE_HAS_RUN_MOUNT ? fds[count - 1] : -1;
        result = release_child(request, layer_fds, slot, pid, pidfd, ends[1], run_fd, &mounts, failure);
        if (result < 0)
            sys_pidfd_send_signal(pidfd, SIGKILL);
    }
    close(ends[0]);
    close_if_open(mounts.overlay_fd);
    close_if_open(mounts.shared_fd);
    if (result < 0) {
        close_if_open(mounts.writable_fd);
        close_if_open(pidfd);
        close(ends[1]);
        return -1;
    }
    /* Kept until RELEASE: letting go of a mount takes longer than creating one. */
    int kept = make_long_lived(mounts.writable_fd);
    slot->writable_fd = kept < 0 ? 0 : kept;
    reply->pid = pid;
    reply_fds[0] = pidfd;
    reply_fds[1] = ends[1];
    return 0;
}

static int release(const struct spawner_request *request, struct failure *failure)
{
    if (request->slot >= DSEC_SLOTS_MAX)
        return refuse(failure, EINVAL);
    struct slot *slot = &slots[request->slot];
    slot_release_layer(slot);
    slot_renew_network(slot, host.own_network_fd);
    return 0;
}

/* Answer one request. Returns -1 when the daemon is gone. */
static int serve(int socket_fd)
{
    struct spawner_request request;
    struct spawner_reply reply = {0};
    struct failure failure = {STEP_NONE, 0};
    int fds[DSEC_DESCRIPTORS_MAX], count = 0, reply_fds[2] = {-1, -1}, result;

    memset(&request, 0, sizeof request);
    ssize_t size = packet_receive(socket_fd, &request, sizeof request, fds, &count, 0);
    if (size == 0 || (size < 0 && errno != EMSGSIZE))
        return -1;
    if (size != (ssize_t)sizeof request) {
        result = refuse(&failure, EPROTO);
    } else {
        switch (request.kind) {
        case SPAWNER_HOLD:
            result = hold(&request, fds, count, &failure);
            break;
        case SPAWNER_DROP:
            result = drop(&request, &failure);
            break;
        case SPAWNER_WARM:
            result = check_slot(&request, &failure);
            if (result == 0)
                result = slot_warm(&slots[request.slot], request.base_id, host.own_network_fd, &failure);
            break;
        case SPAWNER_CREATE:
            result = create(&request, fds, count, &reply, reply_fds, &failure);
            break;
        case SPAWNER_RELEASE:
            result = release(&request, &failure);
            break;
        default:
            result = refuse(&failure, EPROTO);
        }
    }
    reply.kind = request.kind;
    reply.request_id = request.request_id;
    reply.error = result < 0 ? failure.error : 0;
    reply.step = result < 0 ? failure.step : STEP_NONE;
    int sent = packet_send(socket_fd, &reply, sizeof reply, reply_fds, reply_fds[0] >= 0 ? 2 : 0, 0);
    close_if_open(reply_fds[0]);
    close_if_open(reply_fds[1]);
    for (int i = 0; i < count; i++)
        close(fds[i]);
    return sent;
}

int main(int argc, char **argv)
{
    struct failure failure = {STEP_NONE, 0};

    if (argc != 4) {
        fprintf(stderr, "usage: spawner SOCKET_FD INIT_PATH FILTER_FD\n");
        return 2;
    }
    int socket_fd = atoi(argv[1]);
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    fcntl(socket_fd, F_SETFD, FD_CLOEXEC);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_NAME, "dsec-spawner");
    signal(SIGCHLD, SIG_IGN); /* children are watched by pidfd, nobody waits for them */
    signal(SIGINT, SIG_IGN);  /* a terminal's Ctrl-C is the daemon's to handle */
    if (prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP) < 0)
        fail(&failure, STEP_NAMESPACE_TREE);
    else
        host_prepare(&host, argv[2], atoi(argv[3]), &failure);
    /* Children cut off what lies above the program's descriptor: were this socket still open in one of them,
     * the daemon would not see us die. */
    if (!failure.error && (socket_fd = make_long_lived(socket_fd)) < 0)
        return 1;

    struct spawner_reply hello = {.error = failure.error, .step = failure.step, .pid = getpid()};
    if (packet_send(socket_fd, &hello, sizeof hello, NULL, 0, 0) < 0 || failure.error)
        return 1;
    while (serve(socket_fd) == 0)
        ;
    return 0;
}
