/* Runs one kernel on one thread: reads the slots of its parameters and the memory that they point into from standard
   input, and writes that memory to standard output. Words of 64 bits: numbers of slots and of regions; slots; sizes of
   the regions; for each slot the region that it points into (-1: none) and where; then the regions themselves. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

void attention(int64_t *slots);

static void *read_words(void *to, size_t bytes) {
  if (fread(to, 1, bytes, stdin) != bytes) exit(3);
  return to;
}

int main(void) {
  int64_t count[2];
  read_words(count, sizeof count);
  int64_t *slots = read_words(malloc(8 * count[0] + 8), 8 * count[0]);
  int64_t *sizes = read_words(malloc(8 * count[1] + 8), 8 * count[1]);
  int64_t *places = read_words(malloc(16 * count[0] + 8), 16 * count[0]);
  char **regions = malloc(8 * count[1] + 8);
  for (int64_t n = 0; n < count[1]; n++)
    regions[n] = read_words(aligned_alloc(64, (sizes[n] + 127) / 64 * 64), sizes[n]);
  for (int64_t n = 0; n < count[0]; n++)
    if (places[2 * n] >= 0) slots[n] = (int64_t)(regions[places[2 * n]] + places[2 * n + 1]);
  attention(slots);
  for (int64_t n = 0; n < count[1]; n++) fwrite(regions[n], 1, sizes[n], stdout);
  return 0;
}
