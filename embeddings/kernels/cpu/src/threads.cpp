#include "threads.h"

#include <algorithm>
#include <atomic>
#include <dlfcn.h>
#include <pthread.h>

namespace {

// OpenMP under the names that every runtime of it has (GNU's, LLVM's, Intel's). torch has loaded one, and its threads do
// our work too: threads of our own would be asleep when a call comes, and in torch's way when they are awake.
struct OpenMP {
  using Parallel = void(void (*)(void*), void*, unsigned num_threads, unsigned flags);
  Parallel* parallel = reinterpret_cast<Parallel*>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  int (*thread_number)() = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
  // A fork copies no thread, and a runtime that had some would wait for them for ever.
  static inline bool has_lost_threads = false;

  OpenMP() { pthread_atfork(nullptr, nullptr, [] { has_lost_threads = true; }); }
  bool is_usable() const { return parallel && thread_number && !has_lost_threads; }
};

constexpr int MAX_THREADS = 128;

// Each worker has a part of the tasks, the same in every loop of so many tasks: what it touched before is in its cache.
// Who is done helps the next.
struct Job {
  void (*function)(void*, int64_t, int);
  void* context;
  int64_t num_tasks;
  int num_parts;
  int (*thread_number)();
  struct alignas(64) Part { std::atomic<int64_t> next; } parts[MAX_THREADS];

  int64_t start_of(int part) const { return num_tasks * part / num_parts; }

  void work() {
    const int worker = thread_number();
    for (int i = 0; i < num_parts; ++i) {
      const int part = (worker + i) % num_parts;
      const int64_t end = start_of(part + 1);
      for (int64_t task; (task = parts[part].next.fetch_add(1, std::memory_order_relaxed)) < end;)
        function(context, task, worker);
    }
  }
};

}  // namespace

void run_tasks(int num_threads, int64_t num_tasks, void (*function)(void*, int64_t, int), void* context) {
  num_threads = int(std::min<int64_t>({num_threads, num_tasks, MAX_THREADS}));
  static const OpenMP openmp;
  if (num_threads < 2 || !openmp.is_usable()) {
    for (int64_t task = 0; task < num_tasks; ++task) function(context, task, 0);
    return;
  }
  Job job{function, context, num_tasks, num_threads, openmp.thread_number, {}};
  for (int part = 0; part < num_threads; ++part) job.parts[part].next.store(job.start_of(part), std::memory_order_relaxed);
  openmp.parallel([](void* given) { static_cast<Job*>(given)->work(); }, &job, unsigned(num_threads), 0);
}
