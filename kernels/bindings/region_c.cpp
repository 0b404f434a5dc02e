#include <cstring>

#include "bindings/guard.h"
#include "expert_region.h"

namespace glm53 {

LastError& last_error() {
  thread_local LastError error;
  return error;
}

}  // namespace glm53

using glm53::guarded;

namespace {

glm53::ArenaSpec spec_of(const MoeExpertShape* shapes, uint32_t num_layers, uint32_t experts_per_layer, const uint8_t* checkpoint_hash) {
  return {shapes, num_layers, experts_per_layer, checkpoint_hash};
}

// A field of a header as a number: one overload per type that the X-macro lists use.
uint64_t number(uint32_t value) { return value; }
uint64_t number(uint64_t value) { return value; }
uint64_t number(const AbiWord& word) { return abi_load(&word); }
uint64_t number(const AbiBell& bell) { return abi_load_bell(&bell); }

Glm53Arena* wrap(std::unique_ptr<glm53::Arena> impl) { return new Glm53Arena{std::move(impl)}; }
Glm53Region* wrap(std::unique_ptr<glm53::Region> impl) { return new Glm53Region{std::move(impl)}; }

}  // namespace

extern "C" {

int glm53_error_code(void) { return glm53::last_error().code; }
const char* glm53_error_text(void) { return glm53::last_error().text.c_str(); }

Glm53Arena* glm53_arena_create(const char* path, const MoeExpertShape* shapes, uint32_t num_layers, uint32_t experts_per_layer,
                               const uint8_t* checkpoint_hash) {
  return guarded<Glm53Arena*>(
      nullptr, [&] { return wrap(glm53::Arena::create(path, spec_of(shapes, num_layers, experts_per_layer, checkpoint_hash))); });
}

Glm53Arena* glm53_arena_attach(const char* path, uint64_t generation) {
  return guarded<Glm53Arena*>(nullptr, [&] { return wrap(glm53::Arena::attach(path, generation)); });
}

Glm53Arena* glm53_arena_adopt(const char* path, const MoeExpertShape* shapes, uint32_t num_layers, uint32_t experts_per_layer,
                              const uint8_t* checkpoint_hash) {
  return guarded<Glm53Arena*>(
      nullptr, [&] { return wrap(glm53::Arena::adopt(path, spec_of(shapes, num_layers, experts_per_layer, checkpoint_hash))); });
}

void* glm53_arena_record(Glm53Arena* arena, uint64_t slot) {
  return slot < arena->impl->header().num_slots ? arena->impl->record(slot) : nullptr;
}

int glm53_arena_finish(Glm53Arena* arena, uint64_t first, uint64_t count) {
  return guarded(-1, [&] { return arena->impl->finish(first, count), 0; });
}

int glm53_arena_seal(Glm53Arena* arena) {
  return guarded(-1, [&] { return arena->impl->seal(), 0; });
}

int glm53_arena_check(Glm53Arena* arena, uint64_t slot) {
  return guarded(-1, [&] { return static_cast<int>(arena->impl->check(slot)); });
}

int glm53_arena_rewrite_begin(Glm53Arena* arena, uint64_t slot) {
  return guarded(-1, [&] { return arena->impl->rewrite_begin(slot), 0; });
}

int glm53_arena_rewrite_end(Glm53Arena* arena, uint64_t slot) {
  return guarded(-1, [&] { return arena->impl->rewrite_end(slot), 0; });
}

uint32_t glm53_arena_generation_of(const Glm53Arena* arena, uint64_t slot) {
  return slot < arena->impl->header().num_slots ? arena->impl->generation_of(slot) : 0;
}

#define RETURN_FIELD(type, field) \
  if (std::strcmp(name, #field) == 0) return number(header.field);
#define SKIP_ARRAY(type, field, count)

uint64_t glm53_arena_field(const Glm53Arena* arena, const char* name) {
  const AbiArenaHeader& header = arena->impl->header();
  ABI_ARENA_HEADER_FIELDS(RETURN_FIELD, SKIP_ARRAY)
  return UINT64_MAX;
}

uint64_t glm53_region_field(const Glm53Region* region, const char* name) {
  const AbiCtlHeader& header = region->impl->words();
  ABI_CTL_HEADER_FIELDS(RETURN_FIELD, SKIP_ARRAY)
  return UINT64_MAX;
}

const AbiArenaHeader* glm53_arena_header(const Glm53Arena* arena) { return &arena->impl->header(); }

const MoeExpertShape* glm53_arena_shape(const Glm53Arena* arena, uint32_t layer) {
  return layer < arena->impl->header().num_layers ? &arena->impl->shape(layer) : nullptr;
}

int glm53_arena_unlink(Glm53Arena* arena) {
  return guarded(-1, [&] { return arena->impl->unlink(), 0; });
}

void glm53_arena_close(Glm53Arena* arena) { delete arena; }

Glm53Region* glm53_region_create(const char* path, const Glm53Arena* arena, uint32_t ring_len, uint32_t num_buffers, uint32_t max_rows,
                                 uint32_t max_picks) {
  return guarded<Glm53Region*>(nullptr,
                               [&] { return wrap(glm53::Region::create(path, *arena->impl, ring_len, num_buffers, max_rows, max_picks)); });
}

Glm53Region* glm53_region_attach(const char* path, uint64_t generation) {
  return guarded<Glm53Region*>(nullptr, [&] { return wrap(glm53::Region::attach(path, generation)); });
}

AbiCtlHeader* glm53_region_header(const Glm53Region* region) { return &region->impl->words(); }

int glm53_region_current(const Glm53Region* region) { return region->impl->current(); }

int glm53_region_unlink(Glm53Region* region) {
  return guarded(-1, [&] { return region->impl->unlink(), 0; });
}

void glm53_region_close(Glm53Region* region) { delete region; }

}  // extern "C"
