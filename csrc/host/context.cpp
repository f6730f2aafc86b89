// Orchestration of one batch: tasks over features and tables, phases, barriers, replicas.
#include "host/context.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "host/kernels.h"

namespace oper::host {

void Scratch::Block::grow(size_t need) {
  std::free(data);
  size = need + need / 4;
  data = static_cast<char*>(std::aligned_alloc(64, (size + 63) / 64 * 64));
  if (data == nullptr) {
    size = 0;
    throw std::bad_alloc();
  }
}

Scratch::~Scratch() {
  for (Block& block : blocks_) std::free(block.data);
}

Scratch* Context::take_scratch() {
  std::lock_guard<std::mutex> lock(scratch_mutex_);
  if (scratch_free_.empty()) {
    scratch_all_.push_back(std::make_unique<Scratch>());
    return scratch_all_.back().get();
  }
  Scratch* scratch = scratch_free_.back();
  scratch_free_.pop_back();
  return scratch;
}

void Context::give_scratch(Scratch* scratch) {
  std::lock_guard<std::mutex> lock(scratch_mutex_);
  scratch_free_.push_back(scratch);
}

const Kernels& kernels() {
#if defined(__x86_64__)
  static const Kernels& chosen = [&]() -> const Kernels& {
    const char* wanted = std::getenv("OPER_CPU_KERNELS");
    const bool has512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
    const bool has2 = __builtin_cpu_supports("avx2");
    if (wanted != nullptr && std::strcmp(wanted, "generic") == 0) return kKernelsGeneric;
    if (wanted != nullptr && std::strcmp(wanted, "avx2") == 0 && has2) return kKernelsAvx2;
    return has512 ? kKernelsAvx512 : has2 ? kKernelsAvx2 : kKernelsGeneric;
  }();
  return chosen;
#else
  return kKernelsGeneric;
#endif
}

namespace {

// Runs `task(index, scratch)` for index in [0, count), largest tasks first when the caller orders
// them so; each thread takes the next one. Results do not depend on who takes what.
template <class Task>
void run_tasks(Context& context, int64_t count, ParallelFor parallel, const Task& task) {
  struct Shared {
    Context& context;
    const Task& task;
    std::atomic<int64_t> next{0};
    int64_t count;
  } shared{context, task, {}, count};
  shared.count = count;
  parallel(
      count,
      [](int64_t, int64_t, void* argument) {
        Shared& s = *static_cast<Shared*>(argument);
        Scratch* scratch = s.context.take_scratch();
        for (int64_t i; (i = s.next.fetch_add(1)) < s.count;) s.task(i, *scratch);
        s.context.give_scratch(scratch);
      },
      &shared);
}

void note_bad(std::atomic<int64_t>& bad, int64_t found) {
  if (found < 0) return;
  int64_t seen = bad.load();
  while ((seen < 0 || found < seen) && !bad.compare_exchange_weak(seen, found)) {
  }
}

int64_t num_ids(const Table& table, const Batch& batch) {
  int64_t n = 0;
  for (int32_t f : table.features) {
    const int64_t key = batch.key_of[f];
    if (key >= 0)
      n += batch.offsets[(key + 1) * batch.batch_size] - batch.offsets[key * batch.batch_size];
  }
  return n;
}

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Lay the tables out in this rank's outbox; false when they do not fit.
bool lay_out_outbox(Context& context, const Batch& batch) {
  int64_t at = round_up(
      static_cast<int64_t>(context.tables.size()) * context.outbox_entry_bytes(), 4096);
  for (size_t t = 0; t < context.tables.size(); ++t) {
    const Table& table = context.tables[t];
    const int64_t most = std::min(num_ids(table, batch), table.home.num_rows);
    OutboxTable* entry = context.outbox_table(context.rank, static_cast<int64_t>(t));
    entry->slots_offset = at;
    at = round_up(at + most * 4, 64);
    entry->rows_offset = at;
    at = round_up(at + most * table.row_bytes(), 64);
  }
  return at <= context.outbox_bytes;
}

// Copy the rows that their owners have just updated into this rank's replicas.
void refresh_replicas(const Context& context) {
  for (const Refresh& part : context.refreshes) {
    if (part.replicas == nullptr) continue;
    const Table& table = context.tables[part.table];
    const size_t bytes = static_cast<size_t>(table.row_bytes());
    const uint32_t* touched = table.touched[part.owner];
    const uint32_t* end = touched + 1 + touched[0];
    const uint32_t* slot =
        std::lower_bound(touched + 1, end, static_cast<uint32_t>(part.slot_begin));
    for (; slot != end && *slot < part.slot_end; ++slot) {
      const int64_t row = part.first + (*slot - part.slot_begin) * part.stride;
      std::memcpy(part.replicas + row * static_cast<int64_t>(bytes),
                  part.masters + *slot * static_cast<int64_t>(bytes), bytes);
    }
  }
}

Status barrier(Context& context) {
  if (!context.barrier) return {};
  int32_t culprit = -1;
  const Barrier::Result result = context.barrier->arrive(&culprit);
  return {static_cast<int64_t>(result), culprit};
}

}  // namespace

Status forward(Context& context, const Batch& batch, float* out, ParallelFor parallel) {
  const int64_t B = batch.batch_size;
  // Bags are handed to threads in blocks of about a thousand.
  const int64_t F = static_cast<int64_t>(context.features.size());
  const int64_t blocks = std::max<int64_t>(1, (B + 1023) / 1024);
  const int64_t step = (B + blocks - 1) / blocks;
  std::atomic<int64_t> bad{-1};
  run_tasks(context, F * blocks, parallel, [&](int64_t task, Scratch& scratch) {
    const int64_t f = task / blocks, begin = (task % blocks) * step;
    const int64_t end = std::min(B, begin + step);
    const Feature& feature = context.features[f];
    const Table& table = context.tables[feature.table];
    const int64_t key = batch.key_of[f];
    float* to = out + feature.column;
    if (key < 0) {
      for (int64_t b = begin; b < end; ++b)
        std::memset(to + b * context.output_columns, 0, static_cast<size_t>(table.row_bytes()));
      return;
    }
    const BagRange bags{batch.ids, batch.offsets + key * B, batch.weights, begin, end,
                        batch.ids_are_32_bit};
    note_bad(bad, kernels().pool(table, bags, to, context.output_columns, scratch));
  });
  if (bad.load() >= 0) return {4, bad.load()};
  return {};
}

Status backward(Context& context, const Batch& batch, const float* grad, int64_t grad_stride,
                const OptimizerArgs& args, ParallelFor parallel) {
  if (!lay_out_outbox(context, batch)) return {3, -1};
  const int64_t T = static_cast<int64_t>(context.tables.size());
  // Largest table first, so that no thread starts the longest task last.
  std::vector<int32_t> order(static_cast<size_t>(T));
  std::vector<int64_t> sizes(static_cast<size_t>(T));
  for (int64_t t = 0; t < T; ++t) {
    order[t] = static_cast<int32_t>(t);
    sizes[t] = num_ids(context.tables[t], batch) * context.tables[t].dim;
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return sizes[a] > sizes[b]; });
  std::atomic<int64_t> bad{-1};
  run_tasks(context, T, parallel, [&](int64_t task, Scratch& scratch) {
    note_bad(bad, kernels().reduce(context, order[task], batch, grad, grad_stride, scratch));
  });
  if (bad.load() >= 0) return {4, bad.load()};
  Status status = barrier(context);
  if (status.code != 0) return status;
  run_tasks(context, T, parallel,
            [&](int64_t task, Scratch&) { kernels().update(context, order[task], args); });
  status = barrier(context);
  if (status.code != 0) return status;
  refresh_replicas(context);
  return {};
}

}  // namespace oper::host
