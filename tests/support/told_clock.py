"""A wall clock that a process can be told: a library, loaded before libc, adds the seconds that a file holds."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

JUMP_HOURS = 6.0
_SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long long told(void) {
  static volatile long long *seconds;
  if (!seconds) {
    int file = open(getenv("TOLD_CLOCK"), O_RDONLY | O_CLOEXEC);
    void *found = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (found == MAP_FAILED) abort();
    close(file);
    seconds = found;
  }
  return *seconds;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
  int result = syscall(SYS_clock_gettime, clock, at);
  if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += told();
  return result;
}

int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}

/* The kernel waits by its own clock. Moments of the clock since the boot are small numbers. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
  struct timespec at = *until;
  int of_day = at.tv_sec > 500000000;
  if (of_day) at.tv_sec -= told();
  return pthread_cond_clockwait(condition, mutex, of_day ? CLOCK_REALTIME : CLOCK_MONOTONIC, &at);
}

time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""


class ToldClock:
    """``environment``: for the processes that are to have this clock. It needs a C compiler, ``cc``."""

    def __init__(self, folder: Path, name: str):
        self._file, library = folder / name, folder / "told_clock.so"
        self.tell(0)
        if not library.exists():
            command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), "-x", "c", "-"]
            subprocess.run(command, input=_SOURCE, text=True, check=True)
        self.environment = {"LD_PRELOAD": str(library), "TOLD_CLOCK": str(self._file)}

    def tell(self, seconds: int) -> None:
        """Set the clock by so much before (or, negative, behind) the machine's, in all of its processes at once."""
        self._file.touch()
        with self._file.open("r+b") as file:
            file.write(seconds.to_bytes(8, "little", signed=True))

    def jump(self, chance: random.Random) -> None:
        """Set the clock hours ahead or behind; every other time right again."""
        self.tell(chance.choice([0, int(chance.uniform(-JUMP_HOURS, JUMP_HOURS) * 3600)]))
