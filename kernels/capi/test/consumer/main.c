#include <specdec_kernels.h>
#include <stdio.h>

int main(void) {
  const int64_t tokens[] = {5, 7, 8, 9}, parents[] = {-1, 0, 0, 2}, count[] = {4}, chosen[] = {8, 1, 9, 6};
  int64_t path[3], length, bonus;
  const int status = specdec_cpu_verify_walk(path, &length, &bonus, tokens, parents, count, chosen, 1, 4);
  printf("%s: %d nodes accepted, bonus %d; GPU kernels: %d\n", specdec_status_string(status), (int)length, (int)bonus,
         specdec_has_cuda);
  return !(status == SPECDEC_OK && length == 2 && path[0] == 2 && path[1] == 3 && bonus == 6);
}
