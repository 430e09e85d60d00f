/*
 * The process that becomes a sandbox, from its clone to PID 1. The order matters:
 *
 *   own descriptor table -> v1 cgroups -> handshake (ids mapped, root made) -> cgroup namespace -> identity
 *   -> host name -> root, /proc and its masks, /dev, /dev/pts, /dev/shm, /run/dsec -> pivot_root
 *   -> resource limits -> scheduling class -> capabilities -> no_new_privs -> seccomp -> exec of PID 1
 *
 * A step that fails is told on the control socket, and the process ends: nothing of it stays.
 */
#include "spawner.h"

#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <linux/capability.h>
#include <linux/seccomp.h>

#define PTYS_MAX "16"

/* For the moment between our birth and the death signal's request; the spawner takes milliseconds. */
#define SPAWNER_TIMEOUT_MS 10000

/* Below LONG_LIVED_FD_MIN and above anything a request brings. */
#define CONTROL_FD_TEMPORARY 900

static _Noreturn void broken(int control_fd, enum dsec_step step)
{
    struct control_reply reply = {.kind = CONTROL_BROKEN, .error = errno ? errno : EIO, .step = step};
    packet_send(control_fd, &reply, sizeof reply, NULL, 0, 0);
    _exit(1);
}

static void enter_controllers(const struct child_plan *plan)
{
    /* By the process itself: attaching by pid waits for an RCU grace period. */
    for (uint32_t i = 0; i < plan->request->controller_count; i++)
        if (write(plan->controller_fds[i], "0", 1) != 1)
            broken(plan->control_fd, STEP_CGROUP_ENTER);
}

/* Tell the spawner that its descriptors are no longer needed; receive the mounts. */
static void shake_hands(const struct child_plan *plan, int *mounts, int *mount_count)
{
    struct control_reply here = {0};
    char go;

    if (packet_send(plan->control_fd, &here, sizeof here, NULL, 0, 0) < 0)
        _exit(1);
    int wanted = 4 + EXTRA_MOUNTS(plan->request);
    /* The host end is also in our table: should the spawner die here, there is no end of file. */
    struct pollfd polled = {.fd = plan->control_fd, .events = POLLIN};
    if (poll(&polled, 1, SPAWNER_TIMEOUT_MS) <= 0)
        _exit(1);
    if (packet_receive(plan->control_fd, &go, 1, mounts, mount_count, 0) != 1 || *mount_count != wanted)
        broken(plan->control_fd, STEP_HANDSHAKE);
}

static void place(const struct child_plan *plan, int mount_fd, const char *path, enum dsec_step step)
{
    if (move_mount(mount_fd, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH) < 0)
        broken(plan->control_fd, step);
    close(mount_fd);
}

static void clone_onto(const struct child_plan *plan, const char *source, const char *target, unsigned attributes,
                       enum dsec_step step)
{
    struct mount_attr attribute = {.attr_set = attributes};
    int fd = open_tree(AT_FDCWD, source, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (fd < 0)
        broken(plan->control_fd, step);
    if (attributes && mount_setattr(fd, "", AT_EMPTY_PATH, &attribute, sizeof attribute) < 0)
        broken(plan->control_fd, step);
    place(plan, fd, target, step);
}

static void mount_proc(const struct child_plan *plan)
{
    static const char *const read_only[] = {"bus", "fs", "irq", "sys", "sysrq-trigger"};
    /* What the host's root alone may read needs no mask: nobody in the sandbox is that. cmdline names the host. */
    static const char *const masked[] = {"acpi", "asound", "cmdline", "interrupts", "kcore", "keys", "kmsg", "latency_stats",
                                         "sched_debug", "scsi", "timer_list", "timer_stats", "driver", "pressure"};
    const unsigned strict = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
    char path[64] = TINY_NEW_ROOT "/proc/";
    char *name = path + strlen(path);
    struct stat status;

    int context = fsopen("proc", FSOPEN_CLOEXEC);
    if (context < 0 || fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
        broken(plan->control_fd, STEP_PROC_MOUNT);
    int mount_fd = fsmount(context, FSMOUNT_CLOEXEC, strict);
    if (mount_fd < 0)
        broken(plan->control_fd, STEP_PROC_MOUNT);
    close(context);
    place(plan, mount_fd, TINY_NEW_ROOT "/proc", STEP_PROC_MOUNT);

    for (size_t i = 0; i < sizeof read_only / sizeof *read_only; i++) {
        strcpy(name, read_only[i]);
        if (lstat(path, &status) == 0)
            clone_onto(plan, path, path, MOUNT_ATTR_RDONLY | strict, STEP_PROC_MASK);
    }
    for (size_t i = 0; i < sizeof masked / sizeof *masked; i++) {
        strcpy(name, masked[i]);
        if (lstat(path, &status) == 0)
            clone_onto(plan, S_ISDIR(status.st_mode) ? TINY_FURNITURE "/masks/directory" : TINY_FURNITURE "/masks/file",
                       path, strict, STEP_PROC_MASK);
    }
}

static void mount_devices(const struct child_plan *plan, int shared_fd)
{
    static const char *const options[][2] = {
        {"ptmxmode", "0666"}, {"mode", "0620"}, {"gid", "5"}, {"max", PTYS_MAX}};

    clone_onto(plan, TINY_FURNITURE "/dev", TINY_NEW_ROOT "/dev", 0, STEP_DEV_MOUNT);
    int context = fsopen("devpts", FSOPEN_CLOEXEC);
    if (context < 0)
        broken(plan->control_fd, STEP_PTS_MOUNT);
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (fsconfig(context, FSCONFIG_SET_STRING, options[i][0], options[i][1], 0) < 0)
            broken(plan->control_fd, STEP_PTS_MOUNT);
    if (fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
        broken(plan->control_fd, STEP_PTS_MOUNT);
    int mount_fd = fsmount(context, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC);
    if (mount_fd < 0)
        broken(plan->control_fd, STEP_PTS_MOUNT);
    close(context);
    place(plan, mount_fd, TINY_NEW_ROOT "/dev/pts", STEP_PTS_MOUNT);
    place(plan, shared_fd, TINY_NEW_ROOT "/dev/shm", STEP_SHM_MOUNT);
}

static void enter_root(const struct child_plan *plan)
{
    if (chdir(TINY_NEW_ROOT) < 0 || sys_pivot_root(".", ".") < 0 || umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
        broken(plan->control_fd, STEP_PIVOT_ROOT);
}

static void limit_resources(const struct child_plan *plan)
{
    struct rlimit files, cores = {1, 1};
    /* 1, not 0: a core pattern that pipes to a program of the host ignores 0 and stops at 1. */
    if (setrlimit(RLIMIT_CORE, &cores) < 0 || getrlimit(RLIMIT_NOFILE, &files) < 0)
        broken(plan->control_fd, STEP_RESOURCE_LIMITS);
    files.rlim_cur = files.rlim_max < 1024 ? files.rlim_max : 1024;
    if (setrlimit(RLIMIT_NOFILE, &files) < 0)
        broken(plan->control_fd, STEP_RESOURCE_LIMITS);
}

static void drop_capabilities(const struct child_plan *plan)
{
    static const int kept_list[] = {CAP_CHOWN,  CAP_DAC_OVERRIDE, CAP_FOWNER,     CAP_FSETID,
                                    CAP_KILL,   CAP_SETGID,       CAP_SETUID,     CAP_SETPCAP,
                                    CAP_SETFCAP, CAP_SYS_CHROOT,  CAP_NET_BIND_SERVICE};
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[2];
    uint64_t kept = 0;

    for (size_t i = 0; i < sizeof kept_list / sizeof *kept_list; i++)
        kept |= 1ULL << kept_list[i];
    for (int capability = 0; prctl(PR_CAPBSET_READ, capability) >= 0; capability++)
        if (!(kept >> capability & 1) && prctl(PR_CAPBSET_DROP, capability) < 0)
            broken(plan->control_fd, STEP_CAPABILITIES);
    memset(data, 0, sizeof data);
    data[0].effective = data[0].permitted = (uint32_t)kept;
    data[1].effective = data[1].permitted = (uint32_t)(kept >> 32);
    if (syscall(SYS_capset, &header, data) < 0)
        broken(plan->control_fd, STEP_CAPABILITIES);
}

static _Noreturn void become_init(const struct child_plan *plan)
{
    char *const arguments[] = {"dsec-init", NULL};
    char *const environment[] = {NULL};
    sigset_t none;

    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    /* What is ignored stays so over exec: a daemon under nohup would cost every terminal its hang-up. */
    const struct kernel_signal_action usual = {0};
    for (uint64_t left = plan->host->ignored; left; left &= left - 1)
        sys_signal_action(__builtin_ctzll(left) + 1, &usual, NULL);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        broken(plan->control_fd, STEP_NO_NEW_PRIVILEGES);
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &plan->host->filter) < 0)
        broken(plan->control_fd, STEP_SECCOMP);
    syscall(SYS_execveat, plan->host->init_fd, "", arguments, environment, AT_EMPTY_PATH);
    broken(plan->control_fd, STEP_EXEC_INIT);
}

/*
 * The class of all processes to come. Nothing inside undoes it: leaving SCHED_IDLE needs RLIMIT_NICE, which is 0,
 * or CAP_SYS_NICE on the host. A core scheduling cookie is inherited, and its creation is not on the list of calls
 * that the filter lets a sandbox make with an effect on others: a new cookie only separates further.
 */
static void choose_scheduling(const struct child_plan *plan)
{
    const struct rlimit none = {0, 0};
    struct sched_param priority = {.sched_priority = 0};

    if (setrlimit(RLIMIT_NICE, &none) < 0 || setrlimit(RLIMIT_RTPRIO, &none) < 0)
        broken(plan->control_fd, STEP_SCHEDULING);
    if (plan->request->flags & CREATE_BEST_EFFORT && sched_setscheduler(0, SCHED_IDLE, &priority) < 0)
        broken(plan->control_fd, STEP_SCHEDULING);
    if (plan->request->flags & CREATE_CORE_SCHEDULING &&
        prctl(PR_SCHED_CORE, PR_SCHED_CORE_CREATE, 0, PR_SCHED_CORE_SCOPE_THREAD_GROUP, 0) < 0)
        broken(plan->control_fd, STEP_SCHEDULING);
}

/* Whatever the daemon's standard streams are, a sandbox must not hold them. */
static void silence(const struct child_plan *plan)
{
    int null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null_fd < 0 || dup2(null_fd, 0) < 0 || dup2(null_fd, 1) < 0 || dup2(null_fd, 2) < 0)
        broken(plan->control_fd, STEP_DEV_MOUNT);
}

/* Take what we need of the spawner's table, which we share until this returns. */
static void own_descriptors(struct child_plan *plan)
{
    /* The program's descriptor is long-lived; everything else of that range is cut off. */
    unsigned init_fd = (unsigned)plan->host->init_fd;
    if (sys_close_range(init_fd + 1, ~0U, CLOSE_RANGE_UNSHARE) < 0)
        _exit(1);
}

_Noreturn void child_main(const struct child_plan *given)
{
    struct child_plan plan = *given;
    int mounts[DSEC_DESCRIPTORS_MAX], mount_count;

    /* Without the spawner nothing comes of us. Taken back below: PID 1 lives on. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    own_descriptors(&plan);
    enter_controllers(&plan);
    shake_hands(&plan, mounts, &mount_count);
    if (unshare(CLONE_NEWCGROUP) < 0)
        broken(plan.control_fd, STEP_CGROUP_NAMESPACE);
    if (prctl(PR_SET_PDEATHSIG, 0) < 0 || setresgid(0, 0, 0) < 0 || setgroups(0, NULL) < 0 || setresuid(0, 0, 0) < 0)
        broken(plan.control_fd, STEP_IDENTITY);
    if (sethostname(plan.request->hostname, strlen(plan.request->hostname)) < 0)
        broken(plan.control_fd, STEP_HOSTNAME);
    place(&plan, mounts[0], TINY_NEW_ROOT, STEP_ROOT_MOUNT);
    place(&plan, mounts[3], TINY_FURNITURE, STEP_DEV_MOUNT);
    mount_proc(&plan);
    mount_devices(&plan, mounts[1]);
    if (mount_count > 4)
        place(&plan, mounts[4], TINY_NEW_ROOT "/run/dsec", STEP_RUN_MOUNT);
    if (mount_count > 5)
        place(&plan, mounts[5], TINY_NEW_ROOT "/run/dsec/mps", STEP_RUN_MOUNT);
    enter_root(&plan);
    umask(022);
    name_in_hosts(plan.request->hostname, !(plan.request->flags & CREATE_ON_SNAPSHOT));
    silence(&plan);
    limit_resources(&plan);
    choose_scheduling(&plan);
    drop_capabilities(&plan);
    /* What PID 1 keeps goes to its fixed places last: below them live descriptors of the steps above. */
    int control = fcntl(plan.control_fd, F_DUPFD_CLOEXEC, CONTROL_FD_TEMPORARY);
    int host_end = fcntl(plan.host_end_fd, F_DUPFD_CLOEXEC, CONTROL_FD_TEMPORARY);
    int writable = fcntl(mounts[2], F_DUPFD_CLOEXEC, CONTROL_FD_TEMPORARY);
    if (control < 0 || host_end < 0 || writable < 0)
        _exit(1);
    plan.control_fd = control;
    if (dup2(control, DSEC_CONTROL_FD) < 0 || dup2(host_end, DSEC_HOST_END_FD) < 0 ||
        dup2(writable, DSEC_WRITABLE_FD) < 0)
        broken(control, STEP_CONTROL_SOCKET);
    become_init(&plan);
}
