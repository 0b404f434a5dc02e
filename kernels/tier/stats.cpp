#include "tier/stats.h"

#include <cmath>

#include "tier/error.h"

namespace glm53 {

void JsonObject::key(const char* name) {
  if (!body_.empty()) body_ += ", ";
  body_ += std::string("\"") + name + "\": ";
}

JsonObject& JsonObject::add(const char* name, uint64_t value) {
  key(name);
  body_ += format("%llu", static_cast<unsigned long long>(value));
  return *this;
}

JsonObject& JsonObject::add(const char* name, double value) {
  key(name);
  body_ += std::isfinite(value) ? format("%.6g", value) : "null";
  return *this;
}

JsonObject& JsonObject::add(const char* name, const std::string& value) {
  std::string escaped = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') escaped += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      escaped += format("\\u%04x", static_cast<unsigned>(c));
    } else {
      escaped += c;
    }
  }
  return add_raw(name, escaped + "\"");
}

JsonObject& JsonObject::add_raw(const char* name, const std::string& json) {
  key(name);
  body_ += json;
  return *this;
}

std::string lane_counts_json(const std::array<uint64_t, kNumLanes>& counts) {
  JsonObject object;
  for (uint32_t lane = 0; lane < kNumLanes; ++lane) object.add(lane_name(static_cast<Lane>(lane)), counts[lane]);
  return object.text();
}

}  // namespace glm53
