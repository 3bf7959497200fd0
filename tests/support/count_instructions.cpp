// count_instructions FIRST LAST PROGRAM ARGUMENTS: runs a statically linked program one instruction at a time and
// prints how many it has executed at the addresses from FIRST up to LAST (hexadecimal).
#include <sys/personality.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  if (argc < 4) return fprintf(stderr, "usage: count_instructions FIRST LAST PROGRAM ARGUMENTS\n"), 2;
  const unsigned long first = strtoul(argv[1], nullptr, 16), last = strtoul(argv[2], nullptr, 16);
  const pid_t child = fork();
  if (child == 0) {
    personality(ADDR_NO_RANDOMIZE);
    ptrace(PTRACE_TRACEME, 0, nullptr, nullptr);
    execv(argv[3], argv + 3);
    return perror(argv[3]), 127;
  }
  unsigned long executed = 0;
  int status;
  while (waitpid(child, &status, 0) == child && WIFSTOPPED(status)) {
    user_regs_struct registers;
    ptrace(PTRACE_GETREGS, child, nullptr, &registers);
    executed += first <= registers.rip && registers.rip < last;
    ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr);
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return fprintf(stderr, "%s failed\n", argv[3]), 1;
  printf("%lu\n", executed);
}
