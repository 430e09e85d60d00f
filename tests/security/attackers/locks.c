/* Takes locks on ranges of files without end: as a process, as many processes, or as a thread that
   has files of its own. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { CHILDREN = 20, EACH = 100, FILES = 500, STACK = 1 << 16 };

/* The kernel looks through all locks of a file for each new one: few in many files are fast. */
static int take(void *first)
{
    for (long round = 0;; round++)
        for (long file = 0; file < FILES; file++) {
            char path[64];
            snprintf(path, sizeof path, "/tmp/locked-%ld-%ld", (long)first + file, round);
            int descriptor = open(path, O_RDWR | O_CREAT, 0600);
            if (descriptor < 0)
                for (;;)
                    pause();
            for (long at = 0; at < EACH; at++) {
                struct flock lock = {.l_type = F_WRLCK, .l_start = 2 * at, .l_len = 1};
                fcntl(descriptor, F_SETLK, &lock);
            }
        }
    return 0;
}

int main(int count, char **words)
{
    const char *how = count > 1 ? words[1] : "";
    if (!strcmp(how, "children"))
        for (long child = 1; child < CHILDREN; child++)
            if (!fork())
                take((void *)(child * FILES));
    if (!strcmp(how, "thread")) {
        char *stack = mmap(0, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        int flags = CLONE_VM | CLONE_FS | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM;
        if (clone(take, stack + STACK, flags, 0) < 0)
            return perror("clone"), 1;
        syscall(SYS_exit, 0); /* of this thread alone: the leader has no files any more */
    }
    if (!strcmp(how, "description")) {
        struct flock lock = {.l_type = F_WRLCK, .l_len = 1};
        int descriptor = memfd_create("locked", 0);
        printf("%s\n", fcntl(descriptor, F_OFD_SETLK, &lock) ? strerror(errno) : "done");
        return printf("%s\n", fcntl(descriptor, F_OFD_SETLKW, &lock) ? strerror(errno) : "done"), 0;
    }
    return take(0);
}
