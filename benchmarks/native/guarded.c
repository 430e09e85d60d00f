/* The kernel's own limit for forks: children of one sandbox, each guarded as a child of the platform is.
 *
 * `bare` makes sandboxes that hold nobody back: no user namespace, no limits, no filter. A fork of the platform may
 * not leave these out, so its limit is this program: the kernel work that such a child needs, by descriptors, with
 * what can be pooled made before the clock runs, and nothing else. No bus, no log, no books, no agent's socket.
 *
 *   guarded --layers A B C --count N --processes P --filter FILE --unified DIR [--memory DIR --cpu DIR --pids DIR]
 *
 * Once: 1 MiB that a parent changed is copied to a fresh tmpfs. Each child: its directory in the v2 tree and, where
 * given, in the v1 hierarchies of memory, cpu and pids, with limits; clone3 with user, mount, pid, uts and ipc
 * namespaces into that directory and a network namespace from a pool; maps of its own 65,536 ids; a tmpfs for what
 * it writes with its devices; an overlay over id-mapped clones of three EROFS layers and of the copy; /proc with its
 * masks, /dev, /dev/pts, /dev/shm; a cgroup namespace; pivot_root; capabilities dropped; seccomp; Landlock; exec of
 * a static init, ready after that exec. All are alive at once. FILE holds the filter's instructions.
 *
 * Prints one JSON object: N over the seconds from before the copy until the last child is ready.
 */
#include "guarded.h"

#include <limits.h>
#include <linux/securebits.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

struct kit kit = {.trees = {-1, -1, -1, -1}, .layer_count = LAYERS};
static int changes;

static double now_ms(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

/* ---- once, before the clock runs ------------------------------------------------------------ */

static int mount_layer(const char *image)
{
	int context = check(fsopen("erofs", FSOPEN_CLOEXEC), "fsopen erofs");
	check(fsconfig(context, FSCONFIG_SET_STRING, "source", image, 0), image);
	check(fsconfig(context, FSCONFIG_CMD_CREATE, NULL, NULL, 0), image);
	int layer = keep(fsmount(context, FSMOUNT_CLOEXEC, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV),
			 image);
	close(context);
	return layer;
}

/* A mount namespace of two mounts, which each child copies, and a network namespace of our own. */
static void enter_tiny_root(void)
{
	static const char *const directories[] = {"new", "proc", "furniture"};
	int root = mount_tmpfs("4m");
	for (size_t i = 0; i < sizeof directories / sizeof *directories; i++)
		check(mkdirat(root, directories[i], 0755), directories[i]);
	check(unshare(CLONE_NEWNS | CLONE_NEWNET), "unshare");
	check(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "make mounts private");
	check(move_mount(root, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH), "mount the tiny root");
	check(fchdir(root), "chdir");
	check(syscall(SYS_pivot_root, ".", "."), "pivot_root to the tiny root");
	check(umount2(".", MNT_DETACH), "detach the host's root");
	check(chdir("/"), "chdir");
	place(mount_new("proc", NULL, 0, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC), "/proc");
	kit.own_network = keep(open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), "open the network namespace");
	close(root);
}

static struct pooled make_pooled(int number)
{
	struct pooled made;
	struct clone3_arguments arguments = {.flags = CLONE_NEWUSER, .exit_signal = SIGCHLD};
	pid_t pid = check(syscall(SYS_clone3, &arguments, sizeof arguments), "clone3 for a map");
	char text[96];
	if (pid == 0)
		for (prctl(PR_SET_PDEATHSIG, SIGKILL);;)
			pause();
	snprintf(text, sizeof text, "0 %u 65536\n65536 0 1\n", base_of(number));
	write_maps(pid, text);
	snprintf(text, sizeof text, "/proc/%d/ns/user", pid);
	made.mapping = keep(open(text, O_RDONLY | O_CLOEXEC), text);
	kill(pid, SIGKILL);
	check(waitpid(pid, NULL, 0), "reap");

	struct ifreq request = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
	check(unshare(CLONE_NEWNET), "unshare the network");
	int link = check(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "socket");
	check(ioctl(link, SIOCSIFFLAGS, &request), "bring loopback up");
	close(link);
	made.network = keep(open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC), "open a network namespace");
	check(setns(kit.own_network, CLONE_NEWNET), "go back");
	return made;
}

static void fill(int directory, int from)
{
	static char content[FILE_BYTES];
	for (int i = 0; i < FILES; i++) {
		char name[16];
		snprintf(name, sizeof name, "%d", i);
		int to = check(openat(directory, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644), name);
		memset(content, i + 1, from < 0 ? sizeof content : 0);
		if (from >= 0) {
			int source = check(openat(from, name, O_RDONLY | O_CLOEXEC), name);
			check(read(source, content, sizeof content), "read a change");
			close(source);
		}
		if (write(to, content, sizeof content) != FILE_BYTES)
			die(name);
		close(to);
	}
}

static _Noreturn void make_share(int first, int share, int ready, int end)
{
	struct living *children = calloc((size_t)share, sizeof *children);
	char byte = 0;
	if (children == NULL)
		die("allocate");
	for (int i = 0; i < share; i++)
		children[i] = make_child(first + i);
	check(write(ready, &byte, 1), "tell that all are ready");
	check(read(end, &byte, 1), "wait for the end");
	for (int i = 0; i < share; i++)
		end_child(children[i], first + i);
	_exit(0);
}

static double fork_rate(int count, int processes)
{
	int ready[2], end[2], status, failed = 0;
	char byte;
	check(pipe(ready), "pipe");
	check(pipe(end), "pipe");
	double start_ms = now_ms();
	int copy = mount_tmpfs("64m");
	fill(copy, changes);
	set_attributes(copy, MOUNT_ATTR_RDONLY, 0, 0);
	kit.layers[kit.layer_count++] = keep(copy, "keep the copy");
	for (int worker = 0; worker < processes; worker++)
		if (check(fork(), "fork") == 0) {
			check(prctl(PR_SET_PDEATHSIG, SIGKILL), "prctl");
			close(end[1]);
			close(ready[0]);
			make_share(worker * (count / processes), count / processes, ready[1], end[0]);
		}
	close(ready[1]);
	for (int worker = 0; worker < processes; worker++)
		failed |= read(ready[0], &byte, 1) != 1;
	double wall_ms = now_ms() - start_ms;
	close(end[1]);
	for (int worker = 0; worker < processes; worker++) {
		check(wait(&status), "wait");
		failed |= status;
	}
	if (failed) {
		fprintf(stderr, "guarded: a process failed\n");
		_exit(1);
	}
	return count / (wall_ms / 1e3);
}

/* ---- arguments ------------------------------------------------------------------------------ */

static int usage(void)
{
	fprintf(stderr, "usage: guarded --layers A B C --count N --processes P --filter FILE --unified DIR "
			"[--memory DIR --cpu DIR --pids DIR]\n");
	return 2;
}

static void read_filter(const char *path)
{
	struct stat status;
	int fd = check(open(path, O_RDONLY | O_CLOEXEC), path);
	check(fstat(fd, &status), path);
	kit.filter.len = (unsigned short)((size_t)status.st_size / sizeof *kit.filter.filter);
	kit.filter.filter = malloc((size_t)status.st_size);
	if (kit.filter.filter == NULL || read(fd, kit.filter.filter, (size_t)status.st_size) != status.st_size)
		die(path);
	close(fd);
}

/* The init that was built beside this program. A child's own descriptors end at this one. */
static void open_init(void)
{
	char path[PATH_MAX];
	ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
	check(length, "find this program");
	path[length] = 0;
	strcpy(strrchr(path, '/') + 1, "guarded-init");
	kit.init_fd = keep(open(path, O_PATH | O_CLOEXEC), path);
}

int main(int argc, char **argv)
{
	static const char *const names[TREES] = {"--unified", "--memory", "--cpu", "--pids"};
	char **images = NULL;
	int count = 0, processes = 0;

	umask(0);
	open_init(); /* the lowest of the long-lived descriptors */
	for (int i = 1; i + 1 < argc; i++) {
		int tree = 0;
		while (tree < TREES && strcmp(argv[i], names[tree]) != 0)
			tree++;
		if (tree < TREES) {
			const char *path = argv[++i];
			kit.trees[tree] = keep(open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), path);
		}
		else if (strcmp(argv[i], "--layers") == 0 && i + LAYERS < argc)
			images = argv + i + 1, i += LAYERS;
		else if (strcmp(argv[i], "--count") == 0)
			count = atoi(argv[++i]);
		else if (strcmp(argv[i], "--processes") == 0)
			processes = atoi(argv[++i]);
		else if (strcmp(argv[i], "--filter") == 0)
			read_filter(argv[++i]);
		else
			return usage();
	}
	if (images == NULL || processes < 1 || count < processes || count > MAXIMUM_COUNT || kit.trees[0] < 0 ||
	    kit.filter.filter == NULL)
		return usage();

	struct rlimit files;
	check(getrlimit(RLIMIT_NOFILE, &files), "getrlimit");
	files.rlim_cur = files.rlim_max;
	check(setrlimit(RLIMIT_NOFILE, &files), "setrlimit");
	check(prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP), "keep capabilities");
	for (int i = 0; i < LAYERS; i++)
		kit.layers[i] = mount_layer(images[i]);
	enter_tiny_root();
	changes = keep(mount_tmpfs("64m"), "keep the changes");
	fill(changes, -1);
	kit.pool = calloc((size_t)count, sizeof *kit.pool);
	if (kit.pool == NULL)
		die("allocate");
	for (int i = 0; i < count; i++)
		kit.pool[i] = make_pooled(i);
	count -= count % processes;
	printf("{\"count\": %d, \"processes\": %d, \"fork_rate_per_s\": %.2f}\n", count, processes,
	       fork_rate(count, processes));
	return 0;
}
