// Loops over independent tasks on several threads.
#pragma once

#include <cstdint>
#include <type_traits>

// Calls function(context, task, worker) for each task in [0, num_tasks) on at most num_threads threads, of which the
// caller is one; worker < num_threads. Which thread takes a task is left open, so tasks must not depend on it.
void run_tasks(int num_threads, int64_t num_tasks, void (*function)(void*, int64_t, int), void* context);

template <class Function>
void for_tasks(int num_threads, int64_t num_tasks, Function&& function) {
  using Plain = std::remove_reference_t<Function>;
  run_tasks(
      num_threads, num_tasks,
      [](void* context, int64_t task, int worker) { (*static_cast<Plain*>(context))(task, worker); }, &function);
}
