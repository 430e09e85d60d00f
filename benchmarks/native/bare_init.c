/* The first process of a bare sandbox, and the command that it runs.
 *
 * Called as "true" it ends with 0. Otherwise it is PID 1: it says that it is ready on descriptor 3,
 * then runs /bin/true for each byte it receives there and answers with the exit code.
 */
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CONTROL = 3 };

int main(int argc, char **argv)
{
	(void)argc;
	if (strcmp(argv[0], "true") == 0)
		return 0;

	unsigned char byte = 'r';
	if (send(CONTROL, &byte, 1, 0) != 1)
		return 1;
	while (recv(CONTROL, &byte, 1, 0) == 1) {
		pid_t child = vfork();
		if (child == 0) {
			char *arguments[] = {"true", NULL};
			char *environment[] = {NULL};
			execve("/bin/true", arguments, environment);
			_exit(127);
		}
		int status = 0;
		if (child < 0 || waitpid(child, &status, 0) != child)
			return 1;
		byte = WIFEXITED(status) ? (unsigned char)WEXITSTATUS(status) : 255;
		if (send(CONTROL, &byte, 1, 0) != 1)
			return 1;
	}
	return 0;
}
