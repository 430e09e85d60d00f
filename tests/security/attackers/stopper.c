/* Stop or kill every process that appears beside this one: stopper SIGNAL. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **arguments)
{
    int number = count > 1 ? atoi(arguments[1]) : SIGSTOP;
    pid_t own = getpid();

    puts("ready");
    fflush(stdout);
    for (;;)
        for (pid_t pid = 2; pid < own + 400; pid++)
            if (pid != own)
                kill(pid, number);
}
