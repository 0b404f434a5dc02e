// Hints: records of the next layer that are copied while the compute stream runs this one and the copy engine has nothing to do.
//
// In the middle of layer l's step the device says what layer l+1 will probably pick: the ids go to pinned memory, then the hint word gets
// the number of that step. The pager's thread looks at it while it waits for the next request, and not before the step's own reply has
// been seen: the copy engine is idle then, and no table is being read that an eviction changes.
//
//   look    ids by rank, rank 0 of every row first; what is in no slot, at most hint_records, is brought; what is in a slot is kept in it
//   begin   a free slot, else the coldest slot that the running step does not read and that a record picked for the first time would be
//           given; the old record's addresses go to the host before the first byte is sent, for the kernels of later steps
//   send    chunk after chunk on the copy stream, each followed by its number in a word; two are under way at most, and none is begun once
//           the next request is seen: a step's own copies never queue behind more
//   land    when the word has reached the record's last chunk, the record is resident and its addresses are the slot's
//   meet    the next step, whichever it is, ends the hint. A picked record whose bytes are not all there is finished: the rest goes onto
//           the copy stream ahead of the step's other copies and the reply travels behind it. One that is not picked gives its slot back
//           when bytes are missing, and stays when none is, the first one to be driven out.
//
// A copy that was begun is a landing in the slot table (never resident, never a victim) that no pass ends. What is called while the device
// is idle (put, vacate, limit, flush, the end) waits for the chunks under way and gives up what is incomplete.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "expert_pager.h"
#include "tier/heat.h"

namespace glm53 {

struct HintParts {
  static constexpr uint32_t kUnderWay = 2;  // chunks
  static constexpr uint64_t kNoPassEnds = ~UINT64_C(0) - 1;

  // ring: how many steps the host may be ahead. Throws kInvalid naming what is missing.
  HintParts(const PagerSpec& spec, uint32_t ring);

  // By the number of the step that a hint was given in, modulo the ring: rows << 8 | width, 0 for none. Written by the stepping thread.
  std::vector<std::atomic<uint32_t>> given;
  // The pager's thread's: the step whose hint needs no look any more.
  uint64_t over = 0;
  // Chunks that were sent. Written by the pager's thread under the mutex.
  uint32_t chunks = 0;

  // Everything below is guarded by the pager's mutex.
  struct Ahead {
    uint32_t record;
    int32_t slot;
    uint64_t sent;   // bytes
    uint32_t chunk;  // number of its last one
    bool landed;     // resident
    bool counted;    // its step is over and did not pick it; its last chunks are on their way
  };
  const float first_touch;      // score of a record that is picked for the first time
  uint64_t looked_at = 0;       // the youngest step whose hint was looked at, or is void
  std::vector<uint32_t> named;  // records to bring, those from `next` on are not begun
  size_t next = 0;
  std::vector<Ahead> ahead;         // only the last one has bytes to send
  std::vector<int32_t> kept;        // slots that the hint keeps: their records were named
  std::vector<uint64_t> named_at;   // [experts]: step whose hint named it last
  std::vector<uint64_t> picked_at;  // [experts]: step that picked it last, of steps that had something to meet
  double in_the_way = 0;            // records' worth of bytes that the running step's own copies queue behind
  struct Counters {
    uint64_t hinted = 0, started = 0, used = 0, late = 0, dropped = 0, bytes = 0;
  } counters;
};

}  // namespace glm53
