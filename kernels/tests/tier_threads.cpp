// Engine, controller, housekeeper, job server and a reader of the statistics as threads of one process on one mapping, so that a thread
// sanitizer sees every access of the protocol. Exit code 0: every answer had the bits of the run without tiers.
//
//   cmake -S kernels -B build/tsan -DCMAKE_CXX_FLAGS="-fsanitize=thread -Wno-tsan" -DCMAKE_C_FLAGS=-fsanitize=thread
//   cmake --build build/tsan --target tier_threads && build/tsan/tier_threads 200
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "tier/engine.h"

namespace {

using namespace glm53;

constexpr uint32_t kLayers = 2, kExperts = 6, kTopK = 3, kHidden = 128;

struct Batch {
  uint32_t layer, rows;
  std::vector<float> x, weights;
  std::vector<int64_t> sel;
};

Batch random_batch(std::mt19937_64* random) {
  Batch b;
  b.layer = (*random)() % kLayers;
  b.rows = 1 + (*random)() % 4;
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (uint32_t i = 0; i < b.rows * kHidden; ++i) b.x.push_back(uniform(*random));
  for (uint32_t i = 0; i < b.rows * kTopK; ++i) {
    b.weights.push_back(uniform(*random));
    b.sel.push_back(static_cast<int64_t>((*random)() % kExperts));
  }
  return b;
}

std::vector<float> run(TierEngine* engine, const Batch& b) {
  std::vector<float> out(b.x.size());
  engine->forward({b.layer, b.rows, kTopK, b.x.data(), b.sel.data(), b.weights.data(), false, out.data()});
  return out;
}

std::unique_ptr<Arena> make_arena(const std::string& path) {
  MoeExpertShape shape{};
  if (moe_shape_init(&shape, kHidden, 128, 3, 3, 3, MOE_CODEBOOK_MUL1, MOE_ACT_SILU, 0.0f, 0, 0) != 0) std::abort();
  const std::vector<MoeExpertShape> shapes(kLayers, shape);
  const uint8_t hash[32] = {};
  auto arena = Arena::create(path, {shapes.data(), kLayers, kExperts, hash});
  std::mt19937_64 random(1);
  for (uint64_t slot = 0; slot < arena->header().num_slots; ++slot) {
    // Trellis bits are arbitrary; the scales behind them are set to 1.0 (fp16 0x3c00).
    auto* words = reinterpret_cast<uint16_t*>(arena->record(slot));
    for (uint32_t i = 0; i < shape.record_bytes / 2; ++i) words[i] = i * 2 < shape.gate_suh ? static_cast<uint16_t>(random()) : 0x3c00;
  }
  arena->seal();
  return arena;
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 200;
  const std::string stem = "/tmp/glm53-threads-" + std::to_string(getpid());
  std::shared_ptr<Arena> arena = make_arena(stem + "-arena");
  std::shared_ptr<Region> region = Region::create(stem + "-ctl", *arena, 4, 4, 8, 8 * kTopK);
  int wrong = 0;
  for (const char* caller_runs : {"caller_runs=0\n", "caller_runs=1\n"}) {
    TierEngine plain(*arena, nullptr, parse_tier_options("mode=exact\nvariant=scalar"));
    TierEngine tiers(*arena, region.get(),
                     parse_tier_options(std::string(caller_runs) +
                                        "mode=fast\nvariant=scalar\nnum_slots=4\nplanner=fuzz\nthreads=2\nct_timeout_ms=20000"));
    std::atomic<bool> stop{false};
    std::thread reader([&] {
      while (!stop.load()) {
        if (tiers.stats_json().empty()) std::abort();
        usleep(500);
      }
    });
    std::mt19937_64 random(2);
    for (int life = 0; life < 3; ++life) {
      JobServer server(region, arena, parse_server_options("variant=scalar\nthreads=2"));
      std::thread serving([&] { server.run(60'000'000'000); });
      for (int i = 0; i < 5000 && !tiers.lane_up(); ++i) usleep(1000);
      if (!tiers.lane_up()) std::abort();
      for (int i = 0; i < steps; ++i) {
        const Batch b = random_batch(&random);
        wrong += std::memcmp(run(&tiers, b).data(), run(&plain, b).data(), b.x.size() * sizeof(float)) != 0;
        if (i == steps / 2) server.drain();  // the second half meets a lane that goes away
      }
      serving.join();
    }
    stop.store(true);
    reader.join();
    if (!tiers.verify().bad_slots.empty()) ++wrong;
    std::printf("%s\n", tiers.stats_json().c_str());
  }
  region->unlink();
  arena->unlink();
  std::printf("%d wrong answers\n", wrong);
  return wrong == 0 ? 0 : 1;
}
