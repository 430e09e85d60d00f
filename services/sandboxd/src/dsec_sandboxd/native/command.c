/* The forked child that becomes a command. */
#include "pid1.h"

#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>

#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

static _Noreturn void give_up(struct outcome *outcome, enum dsec_step step, int error)
{
    outcome->error = error ? error : EIO;
    outcome->step = (int32_t)step;
    _exit(127);
}

/*
 * What PID 1 needs and a command must not have.
 *
 * clone3: PID 1 puts commands into their cgroups with it. A filter cannot see its flags, so commands get ENOSYS
 * and their C library falls back to clone, whose flags it can see.
 *
 * Filters of their own: compiled filters come from one budget of the node (bpf_jit_limit), charged to nobody. A
 * thousand processes of one sandbox used it up, and no sandbox and no command could start any more. Commands are
 * told EINVAL, as by a kernel without filters, which programs that use them (man, sshd) put up with.
 */
static int deny_what_init_may(void)
{
    const unsigned number = offsetof(struct seccomp_data, nr);
    const unsigned first = offsetof(struct seccomp_data, args); /* its low half: both machines are little-endian */
    struct sock_filter instructions[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, number),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_seccomp, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, first),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SECCOMP_SET_MODE_FILTER, 4, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_prctl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, first),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, PR_SET_SECCOMP, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof instructions / sizeof *instructions, instructions};
    return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program);
}

static const char *find_variable(char *const *environment, const char *name)
{
    size_t length = strlen(name);
    for (; *environment; environment++)
        if (strncmp(*environment, name, length) == 0 && (*environment)[length] == '=')
            return *environment + length + 1;
    return NULL;
}

/* The given environment with PATH and HOME filled in. */
static char **complete_environment(const struct request_view *request, const struct identity *identity)
{
    static char home[sizeof identity->home + 8];
    uint32_t count = request->header->environment_count;
    char **environment = calloc(count + 3, sizeof *environment);
    if (!environment)
        return NULL;
    memcpy(environment, request->environment, count * sizeof *environment);
    if (!find_variable(environment, "PATH"))
        environment[count++] = (char *)"PATH=" DEFAULT_PATH;
    if (!find_variable(environment, "HOME")) {
        snprintf(home, sizeof home, "HOME=%s", identity->home);
        environment[count++] = home;
    }
    return environment;
}

/* Try every directory of PATH; returns the errno that says most. */
static int search_and_execute(char **arguments, char **environment)
{
    const char *path = find_variable(environment, "PATH");
    char candidate[4096];
    int error = ENOENT;

    if (strchr(arguments[0], '/')) {
        execve(arguments[0], arguments, environment);
        return errno;
    }
    while (path && *arguments[0]) {
        size_t length = strcspn(path, ":");
        int size = length ? snprintf(candidate, sizeof candidate, "%.*s/%s", (int)length, path, arguments[0])
                          : snprintf(candidate, sizeof candidate, "./%s", arguments[0]);
        if (size > 0 && size < (int)sizeof candidate) {
            execve(candidate, arguments, environment);
            if (errno != ENOENT && errno != ENOTDIR)
                error = errno;
            if (errno != ENOENT && errno != ENOTDIR && errno != EACCES)
                break;
        }
        path = path[length] ? path + length + 1 : NULL;
    }
    return error;
}

_Noreturn void command_child(const struct request_view *request, const int streams[3], struct outcome *outcome)
{
    struct identity identity;
    sigset_t none;
    int error;

    setsid();
    if (request->header->flags & CONTROL_TERMINAL && ioctl(streams[0], TIOCSCTTY, 0) < 0)
        give_up(outcome, STEP_COMMAND_TERMINAL, errno);
    for (int i = 0; i < 3; i++)
        if (dup2(streams[i], i) < 0)
            give_up(outcome, STEP_PIPES, errno);
    /*
     * Now, not at the exec: the cgroup's directory is among them, and a working directory that is a link to
     * /proc/self/fd/N would lead through it out of the sandbox.
     */
    if (sys_close_range(3, ~0U, 0) < 0)
        give_up(outcome, STEP_PIPES, errno);
    error = resolve_user(request->user, &identity);
    if (error)
        give_up(outcome, STEP_COMMAND_USER, error);
    char **environment = complete_environment(request, &identity);
    if (!environment)
        give_up(outcome, STEP_MEMORY, ENOMEM);
    /* What it writes to is its own: a program may open /dev/stdout again. */
    for (int i = 0; identity.user_id != 0 && i < 3; i++)
        if (i > 0 || request->header->flags & (CONTROL_WITH_STDIN | CONTROL_TERMINAL))
            (void)!fchown(i, identity.user_id, (gid_t)-1);
    if (setrlimit(RLIMIT_NOFILE, &command_descriptor_limit) < 0)
        give_up(outcome, STEP_RESOURCE_LIMITS, errno);
    error = assume_identity(&identity);
    if (error)
        give_up(outcome, STEP_COMMAND_USER, error);
    if (chdir(request->path) < 0)
        give_up(outcome, STEP_COMMAND_DIRECTORY, errno);
    if (deny_what_init_may() < 0)
        give_up(outcome, STEP_COMMAND_SECCOMP, errno);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    error = search_and_execute(request->arguments, environment);
    give_up(outcome, STEP_COMMAND_EXEC, error);
}
