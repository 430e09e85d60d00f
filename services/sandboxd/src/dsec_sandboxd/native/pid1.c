/*
 * PID 1 of a sandbox. It answers the daemon on DSEC_CONTROL_FD, runs commands, owns the reading ends of their
 * pipes (a dead daemon must not mean SIGPIPE), reaps, and never ends by itself.
 *
 * Nobody in the sandbox can ptrace it or open its memory: its program belongs to the host's root and is
 * unreadable, so the kernel keeps it undumpable and outside the sandbox's user namespace. Signals from
 * inside are ignored by the kernel's rule for PID 1 without handlers.
 */
#include "pid1.h"

#include <linux/landlock.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define FILES_MAX 64
#define SINKS_MAX 512

struct command {
    pid_t pid; /* 0: free */
    uint32_t id;
    int output, error; /* our own reading ends, or -1 */
    bool exited, told;
    int status;
};

struct file_operation_state {
    pid_t pid; /* 0: free */
    uint32_t id;
};

static struct command commands[DSEC_COMMANDS_MAX];
static struct file_operation_state file_operations[FILES_MAX];
static int sinks[SINKS_MAX]; /* pipes of finished commands that something still writes to */
static int sink_count;
static struct outcome *outcomes; /* shared with children: commands first, then file operations */
static bool untold;              /* an exit could not be told yet: the socket was full */

static char request_buffer[sizeof(struct control_request) + DSEC_INLINE_PAYLOAD_MAX];

static void tell_failure(uint32_t kind, uint32_t id, enum dsec_step step, int error)
{
    struct control_reply reply = {.kind = kind, .id = id, .error = error ? error : EIO, .step = step};
    packet_send(DSEC_CONTROL_FD, &reply, sizeof reply, NULL, 0, 0);
}

static struct command *find_command(uint32_t id)
{
    for (int i = 0; i < DSEC_COMMANDS_MAX; i++)
        if (commands[i].pid && commands[i].id == id)
            return &commands[i];
    return NULL;
}

/* ---- requests ---- */

/* Cut a payload into strings; every one must end inside it, and nothing may be left over. */
static int view_strings(struct request_view *view, char *payload, char **pointers)
{
    const struct control_request *header = view->header;
    uint64_t fixed = header->kind == CONTROL_EXEC ? 2 : header->operation == FILE_RENAME ? 3 : 2;
    uint64_t total = fixed + header->argument_count + header->environment_count;
    char *end = payload + header->payload_bytes, *cursor = payload;

    for (uint64_t i = 0; i < total; i++) {
        char *nul = cursor < end ? memchr(cursor, 0, (size_t)(end - cursor)) : NULL;
        if (!nul)
            return -1;
        /* The two lists are each followed by NULL. */
        uint64_t gap = i >= fixed + header->argument_count ? 1 : 0;
        pointers[i + gap] = cursor;
        cursor = nul + 1;
    }
    pointers[fixed + header->argument_count] = NULL;
    pointers[total + 1] = NULL;
    view->user = pointers[0];
    view->path = pointers[1];
    view->target = fixed == 3 ? pointers[2] : NULL;
    view->arguments = pointers + fixed;
    view->environment = pointers + fixed + header->argument_count + 1;
    return cursor == end ? 0 : -1;
}

static char *take_payload(const struct control_request *header, ssize_t size, int payload_fd, bool *allocated)
{
    if (!(header->flags & CONTROL_PAYLOAD_IN_FD)) {
        bool whole = (size_t)size == sizeof *header + header->payload_bytes;
        return whole ? request_buffer + sizeof *header : NULL;
    }
    if (payload_fd < 0 || header->payload_bytes > DSEC_PAYLOAD_MAX || (size_t)size != sizeof *header)
        return NULL;
    char *payload = malloc(header->payload_bytes + 1);
    if (payload && pread(payload_fd, payload, header->payload_bytes, 0) != (ssize_t)header->payload_bytes) {
        free(payload);
        return NULL;
    }
    *allocated = true;
    return payload;
}

/* ---- commands ---- */

struct pipes {
    int input[2], output[2], error[2];
};

static void close_pair(int *pair)
{
    close_if_open(pair[0]);
    close_if_open(pair[1]);
    pair[0] = pair[1] = -1;
}

static int open_pipes(struct pipes *pipes, uint32_t flags)
{
    *pipes = (struct pipes){{-1, -1}, {-1, -1}, {-1, -1}};
    if (flags & CONTROL_WITH_STDIN) {
        if (pipe2(pipes->input, O_CLOEXEC) < 0 || fcntl(pipes->input[1], F_SETFL, O_NONBLOCK) < 0)
            return -1;
    } else {
        pipes->input[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (pipes->input[0] < 0)
            return -1;
    }
    if (pipe2(pipes->output, O_CLOEXEC) < 0 || fcntl(pipes->output[0], F_SETFL, O_NONBLOCK) < 0)
        return -1;
    if (flags & CONTROL_MERGE_STDERR)
        return 0;
    return pipe2(pipes->error, O_CLOEXEC) < 0 ? -1 : fcntl(pipes->error[0], F_SETFL, O_NONBLOCK);
}

static pid_t fork_command(const struct request_view *view, const struct pipes *pipes, int cgroup_fd,
                          struct outcome *outcome)
{
    struct clone_arguments arguments = {.exit_signal = SIGCHLD};
    if (cgroup_fd >= 0) {
        arguments.flags = CLONE_INTO_CGROUP;
        arguments.cgroup = (uint64_t)cgroup_fd;
    }
    *outcome = (struct outcome){0, 0};
    pid_t pid = (pid_t)sys_clone3(&arguments);
    if (pid == 0) {
        bool merged = view->header->flags & CONTROL_MERGE_STDERR;
        int streams[3] = {pipes->input[0], pipes->output[1], merged ? pipes->output[1] : pipes->error[1]};
        command_child(view, streams, outcome);
    }
    return pid;
}

static void start_command(const struct request_view *view, int cgroup_fd)
{
    const struct control_request *header = view->header;
    struct pipes pipes;
    int slot = 0;

    while (slot < DSEC_COMMANDS_MAX && commands[slot].pid)
        slot++;
    if (slot == DSEC_COMMANDS_MAX || find_command(header->id)) {
        tell_failure(CONTROL_FAILED, header->id, STEP_PROTOCOL, slot == DSEC_COMMANDS_MAX ? EAGAIN : EEXIST);
        return;
    }
    pid_t pid = -1;
    enum dsec_step step = STEP_PIPES;
    if (open_pipes(&pipes, header->flags) == 0) {
        step = STEP_COMMAND_FORK;
        pid = fork_command(view, &pipes, cgroup_fd, &outcomes[slot]);
    }
    if (pid < 0) {
        tell_failure(CONTROL_FAILED, header->id, step, errno);
        close_pair(pipes.input);
        close_pair(pipes.output);
        close_pair(pipes.error);
        return;
    }
    commands[slot] = (struct command){.pid = pid, .id = header->id, .output = pipes.output[0],
                                      .error = pipes.error[0]};
    struct control_reply reply = {.kind = CONTROL_STARTED, .id = header->id, .status = pid};
    int fds[3], count = 0;
    if (pipes.input[1] >= 0)
        fds[count++] = pipes.input[1];
    fds[count++] = pipes.output[0];
    if (pipes.error[0] >= 0)
        fds[count++] = pipes.error[0];
    packet_send(DSEC_CONTROL_FD, &reply, sizeof reply, fds, count, 0);
    close_pair(pipes.input);
    close_if_open(pipes.output[1]);
    close_if_open(pipes.error[1]);
}

/* Read and forget what waits in a pipe. Returns whether someone may still write to it. */
static bool discard(int fd)
{
    static char nowhere[65536];
    for (int turn = 0; turn < 16; turn++) {
        ssize_t size = read(fd, nowhere, sizeof nowhere);
        if (size == 0 || (size < 0 && errno != EAGAIN && errno != EINTR))
            return false;
        if (size < 0)
            return true;
    }
    return true;
}

/* A process that a finished command left behind may go on writing: into nothing, without SIGPIPE. */
static void sink(int fd)
{
    if (fd < 0)
        return;
    if (sink_count < SINKS_MAX && discard(fd))
        sinks[sink_count++] = fd;
    else
        close(fd);
}

static void finish_command(uint32_t id)
{
    struct command *command = find_command(id);
    if (!command)
        return;
    sink(command->output);
    sink(command->error);
    command->output = command->error = -1;
    if (command->exited && command->told)
        command->pid = 0;
}

/* Signal every process of a command's cgroup, as seen from here: pids cannot leave the sandbox. */
static void signal_tree(const struct control_request *header, int cgroup_fd)
{
    char text[32768], *rest = text, *line;
    int number = (int)header->signal;
    struct command *command = find_command(header->id);

    if (number < 1 || number > 64)
        return;
    int fd = cgroup_fd < 0 ? -1 : openat(cgroup_fd, "cgroup.procs", O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    close_if_open(fd);
    if (size <= 0) {
        if (command && !command->exited)
            kill(-command->pid, number);
        return;
    }
    text[size] = 0;
    while ((line = strsep(&rest, "\n"))) {
        long pid = strtol(line, NULL, 10);
        if (pid > 1)
            kill((pid_t)pid, number);
    }
}

static void start_file_operation(const struct request_view *view)
{
    int slot = 0;
    while (slot < FILES_MAX && file_operations[slot].pid)
        slot++;
    if (slot == FILES_MAX) {
        tell_failure(CONTROL_FILE_DONE, view->header->id, STEP_FILE_FORK, EAGAIN);
        return;
    }
    struct outcome *outcome = &outcomes[DSEC_COMMANDS_MAX + slot];
    *outcome = (struct outcome){0, 0};
    pid_t pid = fork();
    if (pid == 0)
        file_child(view, outcome);
    if (pid < 0) {
        tell_failure(CONTROL_FILE_DONE, view->header->id, STEP_FILE_FORK, errno);
        return;
    }
    file_operations[slot] = (struct file_operation_state){pid, view->header->id};
}

static void handle_with_strings(const struct control_request *header, ssize_t size, int *fds, int count)
{
    uint32_t failed = header->kind == CONTROL_EXEC ? CONTROL_FAILED : CONTROL_FILE_DONE;
    int next = 0, cgroup_fd = -1, payload_fd = -1;
    bool allocated = false, is_command = header->kind == CONTROL_EXEC;

    if (is_command && header->flags & CONTROL_WITH_CGROUP && next < count)
        cgroup_fd = fds[next++];
    if (header->flags & CONTROL_PAYLOAD_IN_FD && next < count)
        payload_fd = fds[next++];
    uint64_t strings = (uint64_t)header->argument_count + header->environment_count;
    char *payload = NULL, **pointers = NULL;
    struct request_view view = {.header = header};
    if ((is_command ? header->argument_count > 0 : strings == 0) && strings <= DSEC_STRINGS_MAX)
        payload = take_payload(header, size, payload_fd, &allocated);
    if (payload)
        pointers = calloc(strings + 6, sizeof *pointers);
    if (!pointers || view_strings(&view, payload, pointers) < 0)
        tell_failure(failed, header->id, STEP_PROTOCOL, EPROTO);
    else if (is_command)
        start_command(&view, cgroup_fd);
    else
        start_file_operation(&view);
    free(pointers);
    if (payload && allocated)
        free(payload);
}

static void handle_request(void)
{
    int fds[DSEC_DESCRIPTORS_MAX], count;
    ssize_t size = packet_receive(DSEC_CONTROL_FD, request_buffer, sizeof request_buffer, fds, &count, MSG_DONTWAIT);
    if (size < 0)
        return;
    const struct control_request *header = (const struct control_request *)request_buffer;
    if (size >= (ssize_t)sizeof *header) {
        if (header->kind == CONTROL_EXEC || header->kind == CONTROL_FILE)
            handle_with_strings(header, size, fds, count);
        else if (header->kind == CONTROL_SIGNAL)
            signal_tree(header, count > 0 ? fds[0] : -1);
        else if (header->kind == CONTROL_DONE)
            finish_command(header->id);
    }
    for (int i = 0; i < count; i++)
        close(fds[i]);
}

/* ---- ends ---- */

static void tell_exits(void)
{
    untold = false;
    for (int i = 0; i < DSEC_COMMANDS_MAX; i++) {
        struct command *command = &commands[i];
        if (!command->pid || !command->exited || command->told)
            continue;
        struct control_reply reply = {.kind = CONTROL_EXITED, .id = command->id, .status = command->status};
        if (outcomes[i].step) {
            reply.kind = CONTROL_FAILED;
            reply.step = (uint32_t)outcomes[i].step;
            reply.error = outcomes[i].error;
        }
        if (packet_send(DSEC_CONTROL_FD, &reply, sizeof reply, NULL, 0, MSG_DONTWAIT) < 0) {
            untold = true;
            return;
        }
        command->told = true;
        if (outcomes[i].step) { /* it never ran, so it left nothing in its pipes */
            close_if_open(command->output);
            close_if_open(command->error);
            command->output = command->error = -1;
        }
        if (command->output < 0 && command->error < 0)
            command->pid = 0;
    }
}

/* Nothing but a process of the sandbox stops a file operation, and then somebody outside waits in vain. */
static void end_stopped(pid_t pid)
{
    for (int i = 0; i < FILES_MAX; i++)
        if (file_operations[i].pid == pid)
            kill(pid, SIGKILL);
}

static void reap(void)
{
    int status;
    pid_t pid;
    bool ended = false;
    while ((pid = waitpid(-1, &status, WNOHANG | WUNTRACED)) > 0) {
        if (WIFSTOPPED(status)) {
            end_stopped(pid);
            continue;
        }
        for (int i = 0; i < DSEC_COMMANDS_MAX; i++) {
            if (commands[i].pid == pid && !commands[i].exited) {
                commands[i].exited = ended = true;
                commands[i].status = status;
            }
        }
        for (int i = 0; i < FILES_MAX; i++) {
            if (file_operations[i].pid != pid)
                continue;
            file_operations[i].pid = 0;
            if (outcomes[DSEC_COMMANDS_MAX + i].step != STEP_COUNT)
                tell_failure(CONTROL_FILE_DONE, file_operations[i].id, STEP_FILE_CHILD_DIED, EIO);
        }
    }
    if (ended)
        tell_exits();
}

/* ---- start ---- */

/*
 * No device nodes, and no change of mounts for any process inside (Landlock forbids those to all it
 * confines). Only what is handled costs anything; moving files between directories must be granted back.
 */
static int confine(void)
{
    const uint64_t refer = LANDLOCK_ACCESS_FS_REFER;
    struct landlock_ruleset_attr attributes = {
        .handled_access_fs = LANDLOCK_ACCESS_FS_MAKE_CHAR | LANDLOCK_ACCESS_FS_MAKE_BLOCK | refer};
    long version = syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
    if (version < 2)
        return 0; /* the host lacks it; the daemon knows and says so */
    int ruleset = (int)syscall(SYS_landlock_create_ruleset, &attributes, sizeof attributes, 0);
    int root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (ruleset < 0 || root < 0)
        return -1;
    struct landlock_path_beneath_attr rule = {.allowed_access = refer, .parent_fd = root};
    if (syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0) < 0 ||
        syscall(SYS_landlock_restrict_self, ruleset, 0) < 0)
        return -1;
    close(root);
    return close(ruleset);
}

static _Noreturn void broken(enum dsec_step step)
{
    tell_failure(CONTROL_BROKEN, 0, step, errno);
    _exit(1);
}

static void drain_sinks(const struct pollfd *polled)
{
    int kept = 0, count = sink_count;
    for (int i = 0; i < count; i++) {
        if (polled[i].revents && !discard(sinks[i]))
            close(sinks[i]);
        else
            sinks[kept++] = sinks[i];
    }
    sink_count = kept;
}

static _Noreturn void loop(int signal_fd)
{
    static struct pollfd polled[2 + SINKS_MAX];
    for (;;) {
        polled[0] = (struct pollfd){.fd = DSEC_CONTROL_FD, .events = (short)(POLLIN | (untold ? POLLOUT : 0))};
        polled[1] = (struct pollfd){.fd = signal_fd, .events = POLLIN};
        int watched_sinks = sink_count;
        for (int i = 0; i < watched_sinks; i++)
            polled[2 + i] = (struct pollfd){.fd = sinks[i], .events = POLLIN};
        if (poll(polled, (nfds_t)(2 + watched_sinks), -1) < 0)
            continue;
        if (watched_sinks)
            drain_sinks(polled + 2);
        if (polled[1].revents) {
            struct signalfd_siginfo info[8];
            if (read(signal_fd, info, sizeof info) > 0)
                reap();
        }
        if (polled[0].revents & POLLOUT)
            tell_exits();
        if (polled[0].revents & POLLIN)
            handle_request();
    }
}

int main(void)
{
    sigset_t children;
    struct control_reply ready = {.kind = CONTROL_READY};

    if (getpid() != 1)
        return 2;
    sys_close_range(DSEC_HOST_END_FD + 1, ~0U, 0);
    fcntl(DSEC_CONTROL_FD, F_SETFD, FD_CLOEXEC);
    fcntl(DSEC_HOST_END_FD, F_SETFD, FD_CLOEXEC);
    if (confine() < 0)
        broken(STEP_LANDLOCK);
    size_t size = (DSEC_COMMANDS_MAX + FILES_MAX) * sizeof *outcomes;
    outcomes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (outcomes == MAP_FAILED)
        broken(STEP_MEMORY);
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    sigprocmask(SIG_BLOCK, &children, NULL);
    int signal_fd = signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signal_fd < 0)
        broken(STEP_MEMORY);
    if (packet_send(DSEC_CONTROL_FD, &ready, sizeof ready, NULL, 0, 0) < 0)
        return 1;
    loop(signal_fd);
}
