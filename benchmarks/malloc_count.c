/* Counts the live bytes of the heap and their peak, for LD_PRELOAD on glibc.
 *
 *   cc -O2 -shared -fPIC malloc_count.c -o malloc_count.so
 *
 * heap_reset() sets the peak to what is live; heap_live() and heap_peak() tell. */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Atomic long live, peak;

static void *added(void *block) {
  if (!block) return NULL;
  long size = (long)malloc_usable_size(block);
  long now = atomic_fetch_add(&live, size) + size;
  long highest = atomic_load(&peak);
  while (now > highest && !atomic_compare_exchange_weak(&peak, &highest, now)) {}
  return block;
}

static void removed(void *block) {
  if (block) atomic_fetch_sub(&live, (long)malloc_usable_size(block));
}

void *malloc(size_t size) { return added(__libc_malloc(size)); }
void *calloc(size_t n, size_t size) { return added(__libc_calloc(n, size)); }
void *memalign(size_t align, size_t size) { return added(__libc_memalign(align, size)); }
void *aligned_alloc(size_t align, size_t size) { return memalign(align, size); }
void *valloc(size_t size) { return memalign(4096, size); }

void free(void *block) {
  removed(block);
  __libc_free(block);
}

void *realloc(void *block, size_t size) {
  long before = block ? (long)malloc_usable_size(block) : 0;
  void *moved = __libc_realloc(block, size);
  if (!moved && size) return NULL; /* the old block is still there */
  atomic_fetch_sub(&live, before);
  return added(moved);
}

int posix_memalign(void **out, size_t align, size_t size) {
  void *block = __libc_memalign(align, size);
  if (!block && size) return ENOMEM;
  *out = added(block);
  return 0;
}

long heap_live(void) { return atomic_load(&live); }
long heap_peak(void) { return atomic_load(&peak); }
void heap_reset(void) { atomic_store(&peak, atomic_load(&live)); }
