#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <pthread.h>
#include <thread>
#include <type_traits>

#include "threads.h"

namespace {

// How long a thread looks for work, or for the others' end, before it sleeps: about 20 microseconds.
constexpr int SPINS = 1 << 10;

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Job {
  void (*function)(void*, int64_t, int);
  void* context;
  int64_t num_tasks;
  int num_seats = 0;  // threads that may still join; guarded by the pool's mutex
  int num_joined = 1;
  std::atomic<int64_t> next{0};
  std::atomic<int> num_working{0};

  void work(int worker) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) function(context, task, worker);
  }
};

class Pool {
 public:
  // Whoever finds the pool taken does its work alone.
  std::mutex caller;

  void run(Job& job, int num_threads) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (num_threads_ < num_threads - 1 && start_thread()) ++num_threads_;
      job.num_seats = num_threads - 1;
      job_ = &job;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job.work(0);
    {
      // Who has not come by now is not waited for: there is nothing left for it.
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = nullptr;
    }
    for (int spin = 0; job.num_working.load(std::memory_order_acquire) > 0; ++spin) {
      if (spin < SPINS) pause_briefly();
      else std::this_thread::yield();
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable wake_;
  Job* job_ = nullptr;                   // guarded by mutex_
  std::atomic<uint64_t> generation_{0};  // of jobs; changed under mutex_
  int num_threads_ = 0;

  bool start_thread() {
    try {
      std::thread([this] { serve(); }).detach();
      return true;
    } catch (...) {
      return false;  // the threads that there are do the work
    }
  }

  void serve() {
    for (uint64_t seen = 0;;) {
      for (int spin = 0; spin < SPINS && generation_.load(std::memory_order_acquire) == seen; ++spin) pause_briefly();
      Job* job;
      int worker;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return job_ != nullptr && generation_.load() != seen; });
        seen = generation_.load();
        job = job_;
        if (job->num_seats == 0) continue;
        --job->num_seats;
        worker = job->num_joined++;
        job->num_working.fetch_add(1, std::memory_order_relaxed);
      }
      job->work(worker);
      job->num_working.fetch_sub(1, std::memory_order_release);
    }
  }
};

// Never destroyed: its threads live as long as the process. A forked child has none of them and starts a pool of its own.
Pool* pool = nullptr;

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  });
  return *pool;
}

}  // namespace

void run_tasks(int num_threads, int64_t num_tasks, void (*function)(void*, int64_t, int), void* context) {
  Job job{function, context, num_tasks};
  if (num_threads > num_tasks) num_threads = int(num_tasks);
  if (num_threads > 1) {
    Pool& taken = the_pool();
    std::unique_lock<std::mutex> alone(taken.caller, std::try_to_lock);
    if (alone.owns_lock()) return taken.run(job, num_threads);
  }
  job.work(0);
}
