// A child that is forked while another thread holds a ForkMutex can lock it. Exit status 0 if so.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "common/fork_mutex.h"

int main() {
  oper::ForkMutex mutex;
  std::atomic<bool> is_held{false};
  std::thread other([&] {
    mutex.lock();
    is_held = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    mutex.unlock();
  });
  while (!is_held) std::this_thread::yield();
  const pid_t child = fork();
  if (child == 0) {
    alarm(5);  // ends a child that waits
    mutex.lock();
    _exit(0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  other.join();
  mutex.lock();  // the parent can lock it, too
  mutex.unlock();
  return status != 0;
}
