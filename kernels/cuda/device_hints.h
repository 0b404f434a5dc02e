// Hints: records of the next layer that are copied while the compute stream runs this one and the copy engine has nothing to do.
//
// In the middle of layer l's step the device says what layer l+1 will probably pick: the ids go to pinned memory, then the hint word gets
// the number of that step. The pager's thread looks at it while it waits for the next request, and not before the step's own reply has
// been seen: the copy engine is idle then, and no table is being read that an eviction changes.
//
//   look    ids by rank, rank 0 of every row first; what is in no slot, at most hint_records, is brought
//   begin   in an empty slot of the pool that the running step does not read
//   send    chunk after chunk on the copy stream, each followed by its number in a word; two are under way at most, and none is begun once
//           the next request is seen: a step's own copies never queue behind more
//           (always by the copy engine, also where a step's own records are gathered: a gather could not be cut off so soon)
//   meet    the next step, whichever it is, ends the hint. A picked record is a hit and its addresses are the slot's. When the word has not
//           reached its last chunk it is finished first: the rest goes onto the copy stream ahead of the step's other copies, and the reply
//           travels behind it. One that is not picked is gone: whatever comes to its slot next is sent behind its last chunk.
//   keep    a picked record asks for a slot in its turn by heat among the step's misses, and by their rule. What is granted, a free slot or
//           the coldest record's, goes to the pool, and the record keeps the slot it lies in: nothing is copied twice. One that is not
//           granted any is a visitor, as a record in transit: it leaves when the next step begins.
//
// Why a pool: in a full cache the coldest record is hotter than most that are missed (which is why those go through transit slots), so by
// the rule of admission a hint would find no slot at all. The pool has twice hint_records slots, for the visitors of the running step and
// for what comes for the next one, but a quarter of the slots at most. Membership is a role, not a place: it moves as above; `put` and
// `limit` take slots out of the pool, and the next step makes up for them with free slots and the coldest records'. Its records count as
// being in no slot where it is asked what is in one (`where`).
//
// A copy that was begun is a landing in the slot table (never resident, never a victim) that no pass ends. What is called while the device
// is idle (put, vacate, limit, flush, the end) waits for the chunks under way and empties the pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "expert_pager.h"

namespace glm53 {

struct HintParts {
  static constexpr uint32_t kUnderWay = 2;   // chunks
  static constexpr uint32_t kPerRecord = 2;  // slots of the pool for each of hint_records
  static constexpr uint32_t kShare = 4;      // of so many slots one may be in the pool
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
  };
  struct Visitor {
    uint32_t record;
    int32_t slot;  // of the pool; kNone once the record keeps it
    float heat;
  };
  uint64_t looked_at = 0;       // the youngest step whose hint was looked at, or is void
  std::vector<uint32_t> named;  // records to bring, those from `next` on are not begun
  size_t next = 0;
  std::vector<Ahead> ahead;         // only the last one has bytes to send
  std::vector<Visitor> visitors;    // of the running step, hottest first once they are weighed
  size_t asked = 0;                 // those before it had their turn to ask for a slot
  std::vector<uint64_t> named_at;   // [experts]: step whose hint named it last
  std::vector<uint64_t> picked_at;  // [experts]: step that picked it last, of steps that had something to meet
  double in_the_way = 0;            // records' worth of bytes that the running step's own copies queue behind
  struct Counters {
    uint64_t hinted = 0, started = 0, used = 0, late = 0, dropped = 0, bytes = 0;
  } counters;
};

}  // namespace glm53
