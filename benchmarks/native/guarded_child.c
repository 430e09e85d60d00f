/* One child of `guarded`: its cgroups, its root, its birth, its end. */
#include "guarded.h"

#include <grp.h>
#include <linux/capability.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>

static const char *const furniture_directories[] = {"upper", "work", "shm", "upper/proc", "upper/dev", "upper/sys",
	"furniture", "furniture/dev", "furniture/dev/pts", "furniture/dev/shm", "furniture/masks",
	"furniture/masks/directory"};

static int make_writable(int mapping)
{
	static const struct {
		const char *path;
		unsigned major, minor;
	} nodes[] = {{"furniture/dev/null", 1, 3}, {"furniture/dev/zero", 1, 5}, {"furniture/dev/full", 1, 7},
		     {"furniture/dev/random", 1, 8}, {"furniture/dev/urandom", 1, 9}, {"furniture/dev/tty", 5, 0}};
	static const char *const links[][2] = {{"/proc/self/fd", "furniture/dev/fd"},
		{"/proc/self/fd/0", "furniture/dev/stdin"}, {"/proc/self/fd/1", "furniture/dev/stdout"},
		{"/proc/self/fd/2", "furniture/dev/stderr"}, {"pts/ptmx", "furniture/dev/ptmx"}};
	int writable = mount_tmpfs("64m");
	for (size_t i = 0; i < sizeof furniture_directories / sizeof *furniture_directories; i++)
		check(mkdirat(writable, furniture_directories[i], 0755), furniture_directories[i]);
	for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++)
		check(mknodat(writable, nodes[i].path, S_IFCHR | 0666, makedev(nodes[i].major, nodes[i].minor)),
		      nodes[i].path);
	for (size_t i = 0; i < sizeof links / sizeof *links; i++)
		check(symlinkat(links[i][0], writable, links[i][1]), links[i][1]);
	check(mknodat(writable, "furniture/masks/file", S_IFREG | 0444, 0), "mknod");
	set_attributes(writable, MOUNT_ATTR_IDMAP, 0, mapping);
	return writable;
}

static int make_overlay(int writable, int mapping)
{
	static const char *const own[][2] = {{"upperdir", "upper"}, {"workdir", "work"}};
	int clones[LAYERS + 1];
	int context = check(fsopen("overlay", FSOPEN_CLOEXEC), "fsopen overlay");
	for (int i = kit.layer_count; i-- > 0;) {
		clones[i] = clone_tree(kit.layers[i], "");
		set_attributes(clones[i], MOUNT_ATTR_IDMAP, 0, mapping);
		check(fsconfig(context, FSCONFIG_SET_FD, "lowerdir+", NULL, clones[i]), "lowerdir+");
	}
	for (int i = 0; i < 2; i++) {
		int fd = check(openat(writable, own[i][1], O_PATH | O_DIRECTORY | O_CLOEXEC), own[i][1]);
		check(fsconfig(context, FSCONFIG_SET_FD, own[i][0], NULL, fd), own[i][0]);
		close(fd);
	}
	check(fsconfig(context, FSCONFIG_SET_STRING, "redirect_dir", "nofollow", 0), "redirect_dir");
	check(fsconfig(context, FSCONFIG_SET_STRING, "metacopy", "off", 0), "metacopy");
	check(fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0), "overlay");
	int overlay = check(fsmount(context, FSMOUNT_CLOEXEC, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV), "overlay");
	close(context);
	for (int i = 0; i < kit.layer_count; i++)
		close(clones[i]);
	return overlay;
}

static void send_mounts(int control, const int *mounts)
{
	char place_for[CMSG_SPACE(MOUNTS * sizeof(int))] = {0}, byte = 'g';
	struct iovec data = {&byte, 1};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = place_for,
				 .msg_controllen = sizeof place_for};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(MOUNTS * sizeof(int));
	memcpy(CMSG_DATA(header), mounts, MOUNTS * sizeof(int));
	check(sendmsg(control, &message, 0), "hand over the mounts");
}

static void receive_mounts(int control, int *mounts)
{
	char place_for[CMSG_SPACE(MOUNTS * sizeof(int))], byte;
	struct iovec data = {&byte, 1};
	struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = place_for,
				 .msg_controllen = sizeof place_for};
	if (recvmsg(control, &message, MSG_CMSG_CLOEXEC) != 1 || CMSG_FIRSTHDR(&message) == NULL)
		die("receive the mounts");
	memcpy(mounts, CMSG_DATA(CMSG_FIRSTHDR(&message)), MOUNTS * sizeof(int));
}

static void mount_proc(void)
{
	static const char *const read_only[] = {"bus", "fs", "irq", "sys", "sysrq-trigger"};
	static const char *const masked[] = {"acpi", "asound", "cmdline", "interrupts", "kcore", "keys", "kmsg",
		"latency_stats", "sched_debug", "scsi", "timer_list", "timer_stats", "driver", "pressure"};
	const unsigned strict = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
	char path[64] = "/new/proc/", *name = path + strlen(path);
	struct stat status;

	place(mount_new("proc", NULL, 0, strict), "/new/proc");
	for (size_t i = 0; i < sizeof read_only / sizeof *read_only; i++) {
		strcpy(name, read_only[i]);
		if (lstat(path, &status) < 0)
			continue;
		int tree = clone_tree(AT_FDCWD, path);
		set_attributes(tree, MOUNT_ATTR_RDONLY | strict, 0, 0);
		place(tree, path);
	}
	for (size_t i = 0; i < sizeof masked / sizeof *masked; i++) {
		strcpy(name, masked[i]);
		if (lstat(path, &status) < 0)
			continue;
		int tree = clone_tree(AT_FDCWD, S_ISDIR(status.st_mode) ? "/furniture/masks/directory"
									 : "/furniture/masks/file");
		set_attributes(tree, strict, 0, 0);
		place(tree, path);
	}
}

static void give_up_rights(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct data[2] = {{0}};
	static const int kept[] = {CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_SETGID,
				   CAP_SETUID, CAP_SETPCAP, CAP_SETFCAP, CAP_SYS_CHROOT, CAP_NET_BIND_SERVICE};
	uint64_t mask = 0;
	for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
		mask |= 1ULL << kept[i];
	for (int capability = 0; prctl(PR_CAPBSET_READ, capability) >= 0; capability++)
		if (!(mask >> capability & 1))
			check(prctl(PR_CAPBSET_DROP, capability), "drop a capability");
	data[0].effective = data[0].permitted = (uint32_t)mask;
	check(syscall(SYS_capset, &header, data), "capset");
	check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");

	struct landlock_ruleset_attr handled = {
		.handled_access_fs = LANDLOCK_ACCESS_FS_MAKE_CHAR | LANDLOCK_ACCESS_FS_MAKE_BLOCK};
	int rules = (int)syscall(SYS_landlock_create_ruleset, &handled, sizeof handled, 0);
	if (rules >= 0) /* a host may lack it; then the platform does without, too */
		check(syscall(SYS_landlock_restrict_self, rules, 0), "landlock");
	check(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &kit.filter), "seccomp");
}

static _Noreturn void become_child(int control, const int *enter)
{
	static const char *const terminals[][2] = {{"ptmxmode", "0666"}, {"mode", "0620"}, {"gid", "5"}, {"max", "16"}};
	char *arguments[] = {"init", NULL}, *environment[] = {NULL};
	int mounts[MOUNTS];
	struct rlimit cores = {1, 1}, files = {1024, 4096};

	check(syscall(SYS_close_range, kit.init_fd + 1, ~0U, 2), "own descriptors");
	for (int i = 1; i < TREES; i++)
		if (enter[i] >= 0) /* by itself: attaching by pid waits for every processor */
			check(write(enter[i], "0", 1), "enter a cgroup");
	check(send(control, "h", 1, 0), "say that we are here");
	receive_mounts(control, mounts);
	check(unshare(CLONE_NEWCGROUP), "unshare the cgroup namespace");
	check(setresgid(0, 0, 0), "setresgid");
	check(setgroups(0, NULL), "setgroups");
	check(setresuid(0, 0, 0), "setresuid");
	check(sethostname("child", 5), "sethostname");
	place(mounts[0], "/new");
	place(mounts[1], "/furniture");
	mount_proc();
	place(clone_tree(AT_FDCWD, "/furniture/dev"), "/new/dev");
	place(mount_new("devpts", terminals, 4, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC), "/new/dev/pts");
	place(mounts[2], "/new/dev/shm");
	check(chdir("/new"), "chdir");
	check(syscall(SYS_pivot_root, ".", "."), "pivot_root");
	check(umount2(".", MNT_DETACH), "detach");
	check(chdir("/"), "chdir");
	check(setrlimit(RLIMIT_CORE, &cores), "setrlimit");
	check(setrlimit(RLIMIT_NOFILE, &files), "setrlimit");
	give_up_rights();
	check(dup2(control, CONTROL), "dup2");
	syscall(SYS_execveat, kit.init_fd, "", arguments, environment, AT_EMPTY_PATH);
	die("exec init");
}

static void limit(int tree, int directory)
{
	static const char *const v2[][2] = {{"memory.max", "536870912"}, {"memory.swap.max", "0"},
		{"memory.oom.group", "1"}, {"cpu.weight", "25"}, {"pids.max", "256"}};
	static const char *const v1[][2] = {{"memory.limit_in_bytes", "536870912"},
		{"memory.memsw.limit_in_bytes", "536870912"}, {"memory.kmem.tcp.limit_in_bytes", "67108864"},
		{"cpu.shares", "256"}, {"pids.max", "256"}};
	static const int of_v1[TREES][2] = {{0, 0}, {0, 3}, {3, 4}, {4, 5}};
	if (tree == 0 && kit.trees[1] < 0)
		for (size_t i = 0; i < sizeof v2 / sizeof *v2; i++)
			write_at(directory, v2[i][0], v2[i][1]);
	for (int i = of_v1[tree][0]; i < of_v1[tree][1]; i++)
		write_at(directory, v1[i][0], v1[i][1]);
}

struct living make_child(int number)
{
	struct living living = {.pidfd = -1};
	int directories[TREES] = {-1, -1, -1, -1}, enter[TREES] = {-1, -1, -1, -1}, control[2], mounts[MOUNTS];
	char name[16], map[32], byte = 0, path[64];
	uint32_t base = base_of(number);

	snprintf(name, sizeof name, "%d", number);
	for (int i = 0; i < TREES && kit.trees[i] >= 0; i++) {
		check(mkdirat(kit.trees[i], name, 0755), "mkdir a cgroup");
		directories[i] = check(openat(kit.trees[i], name, O_RDONLY | O_DIRECTORY | O_CLOEXEC), "open a cgroup");
		limit(i, directories[i]);
		if (i > 0)
			enter[i] = check(openat(directories[i], "tasks", O_WRONLY | O_CLOEXEC), "open tasks");
	}
	check(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control), "socketpair");
	struct clone3_arguments arguments = {
		.flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_PIDFD |
			 CLONE_FILES | INTO_CGROUP,
		.pidfd = (uint64_t)(uintptr_t)&living.pidfd,
		.exit_signal = SIGCHLD,
		.cgroup = (uint64_t)directories[0],
	};
	check(setns(kit.pool[number].network, CLONE_NEWNET), "enter a network namespace");
	check(syscall(SYS_setresuid, -1, base, -1), "take the child's id");
	living.pid = check(syscall(SYS_clone3, &arguments, sizeof arguments), "clone3");
	if (living.pid == 0)
		become_child(control[1], enter);
	check(syscall(SYS_setresuid, -1, 0, -1), "be root again");
	check(setns(kit.own_network, CLONE_NEWNET), "go back");
	snprintf(map, sizeof map, "0 %u 65536\n", base);
	write_maps(living.pid, map);
	snprintf(path, sizeof path, "/proc/%d/oom_score_adj", living.pid);
	write_at(AT_FDCWD, path, "500");

	living.writable = make_writable(kit.pool[number].mapping);
	mounts[1] = clone_tree(living.writable, "furniture");
	set_attributes(mounts[1], MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, MOUNT_ATTR_NODEV, 0);
	mounts[2] = clone_tree(living.writable, "shm");
	set_attributes(mounts[2], MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC, 0, 0);
	mounts[0] = make_overlay(living.writable, kit.pool[number].mapping);
	mounts[3] = living.writable;
	if (recv(control[0], &byte, 1, 0) != 1 || byte != 'h')
		die("wait for the child");
	send_mounts(control[0], mounts);
	for (int i = 0; i < 3; i++)
		close(mounts[i]);
	for (int i = 0; i < TREES; i++) {
		if (directories[i] >= 0)
			close(directories[i]);
		if (enter[i] >= 0)
			close(enter[i]);
	}
	close(control[1]);
	if (recv(control[0], &byte, 1, 0) != 1 || byte != 'r')
		die("wait for the init");
	/* Out of the way of the next child, which gives up what is kept from here on. */
	living.control = keep(control[0], "keep a socket");
	living.pidfd = keep(living.pidfd, "keep a pidfd");
	living.writable = keep(living.writable, "keep a mount");
	return living;
}

void end_child(struct living living, int number)
{
	char name[16];
	check(syscall(SYS_pidfd_send_signal, living.pidfd, SIGKILL, NULL, 0), "kill");
	check(waitpid(living.pid, NULL, 0), "reap");
	close(living.pidfd);
	close(living.control);
	close(living.writable);
	snprintf(name, sizeof name, "%d", number);
	for (int i = 0; i < TREES && kit.trees[i] >= 0; i++)
		for (int tries = 0; unlinkat(kit.trees[i], name, AT_REMOVEDIR) < 0; tries++) {
			if (errno != EBUSY || tries == REMOVE_ATTEMPTS)
				die("remove a cgroup");
			usleep(1000);
		}
}

