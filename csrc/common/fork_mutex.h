// A mutex that no thread holds in a forked child.
#pragma once

#include <pthread.h>

#include <mutex>
#include <set>

namespace oper {

// For short sections that lock and construct no other mutex. fork() first locks all of these mutexes: a child
// lacks its parent's other threads, and would wait for one of them for ever.
class ForkMutex {
 public:
  ForkMutex() {
    const std::lock_guard<std::mutex> lock(all().mutex);
    all().members.insert(this);
  }
  ~ForkMutex() {
    const std::lock_guard<std::mutex> lock(all().mutex);
    all().members.erase(this);
  }
  ForkMutex(const ForkMutex&) = delete;
  ForkMutex& operator=(const ForkMutex&) = delete;
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  struct All {
    All() { pthread_atfork(before_fork, after_fork, after_fork); }
    std::mutex mutex;
    std::set<ForkMutex*> members;
  };
  // Never destroyed: other threads may still be in an operator when the process ends.
  static All& all() {
    static All* instance = new All;
    return *instance;
  }
  static void before_fork() {
    all().mutex.lock();
    for (ForkMutex* member : all().members) member->lock();
  }
  static void after_fork() {  // in the parent and in the child
    for (ForkMutex* member : all().members) member->unlock();
    all().mutex.unlock();
  }
  std::mutex mutex_;
};

}  // namespace oper
