#include "base/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"

namespace oscar {
namespace {

thread_local int t_thread_index = 0;
thread_local bool t_inside = false;

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
}

// How long a thread watches for the next piece of work, or for the others to finish, before it
// sleeps: some ten microseconds, several times the gaps between the calls of one decoding step,
// where waking a sleeping thread would take longer than the work.
constexpr int kSpins = 2000;

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// True when the condition came true while watching.
template <class Condition>
bool spin_until(const Condition& condition) {
  for (int i = 0; i < kSpins; ++i) {
    if (condition()) return true;
    pause_briefly();
  }
  return condition();
}

struct Job {
  size_t count = 0;
  const std::function<void(size_t)>* body = nullptr;
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex error_mutex;
  std::exception_ptr error;

  void run() {
    t_inside = true;
    for (size_t item = next++; item < count; item = next++) {
      if (failed.load(std::memory_order_relaxed)) break;
      try {
        (*body)(item);
      } catch (...) {
        const std::lock_guard lock(error_mutex);
        if (!error) error = std::current_exception();
        failed = true;
      }
    }
    t_inside = false;
  }
};

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }
  ~Pool() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  void run(Job& job) {
    const std::lock_guard run_lock(run_mutex_);
    {
      const std::lock_guard lock(mutex_);
      job_ = &job;
      busy_ = workers_.size();
      ++generation_;
    }
    wake_.notify_all();
    job.run();
    const auto finished = [this] { return busy_ == 0; };
    if (!spin_until(finished)) {
      std::unique_lock lock(mutex_);
      done_.wait(lock, finished);
    }
    job_ = nullptr;
  }

 private:
  void work(int index) {
    t_thread_index = index;
    size_t seen = 0;
    const auto called = [&] { return stop_ || generation_ != seen; };
    while (true) {
      if (!spin_until(called)) {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, called);
      }
      if (stop_) return;
      seen = generation_;
      job_.load()->run();
      if (--busy_ == 0) {
        // Taking the lock orders this behind a caller that is just about to sleep.
        { const std::lock_guard lock(mutex_); }
        done_.notify_all();
      }
    }
  }

  std::vector<std::thread> workers_;
  std::mutex run_mutex_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::atomic<Job*> job_{nullptr};
  std::atomic<size_t> generation_{0};  // raised after job_ and busy_ are set
  std::atomic<size_t> busy_{0};        // workers that have not finished the current job
  std::atomic<bool> stop_{false};
};

std::mutex g_pool_mutex;
std::shared_ptr<Pool> g_pool;

std::shared_ptr<Pool> pool() {
  const std::lock_guard lock(g_pool_mutex);
  if (!g_pool) g_pool = std::make_shared<Pool>(usable_cpus());
  return g_pool;
}

}  // namespace

void set_num_threads(int count) {
  OSCAR_CHECK(count >= 0 && count <= 1024, "thread count: expected 0..1024, got ", count);
  OSCAR_CHECK(!t_inside, "set_num_threads called from inside parallel_for");
  const std::lock_guard lock(g_pool_mutex);
  g_pool = std::make_shared<Pool>(count == 0 ? usable_cpus() : count);
}

int num_threads() { return pool()->size(); }

int thread_index() { return t_thread_index; }

void parallel_for(size_t count, const std::function<void(size_t)>& body) {
  if (t_inside || count <= 1) {
    for (size_t item = 0; item < count; ++item) body(item);
    return;
  }
  const std::shared_ptr<Pool> workers = pool();
  Job job;
  job.count = count;
  job.body = &body;
  if (workers->size() == 1) {
    job.run();
  } else {
    workers->run(job);
  }
  if (job.error) std::rethrow_exception(job.error);
}

void parallel_for_ranges(size_t count, size_t grain,
                         const std::function<void(size_t, size_t)>& body) {
  OSCAR_CHECK(grain > 0, "parallel_for_ranges: grain must be positive");
  parallel_for((count + grain - 1) / grain, [&](size_t item) {
    const size_t begin = item * grain;
    body(begin, std::min(count, begin + grain));
  });
}

}  // namespace oscar
