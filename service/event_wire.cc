#include "service/event_wire.h"

#define MSGPACK_NO_BOOST
#include <algorithm>
#include <cstring>
#include <msgpack.hpp>

namespace kvmill {
namespace {

using Packer = msgpack::packer<msgpack::sbuffer>;

void PackText(Packer& packer, absl::string_view text) {
  packer.pack_str(static_cast<std::uint32_t>(text.size()));
  packer.pack_str_body(text.data(), static_cast<std::uint32_t>(text.size()));
}

// Always 8 bytes: the library makes an integer of 2.0, which is another type to readers.
void PackDouble(msgpack::sbuffer& buffer, double value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  constexpr char kFloat64 = '\xcb';
  buffer.write(&kFloat64, 1);
  const std::string bytes = PackSequence(bits);
  buffer.write(bytes.data(), bytes.size());
}

void PackTextOrNil(Packer& packer, absl::string_view text) {
  if (text.empty()) {
    packer.pack_nil();
  } else {
    PackText(packer, text);
  }
}

void PackHashes(Packer& packer, absl::Span<const BlockKey> keys, WireHashes hashes) {
  packer.pack_array(static_cast<std::uint32_t>(keys.size()));
  for (const BlockKey& key : keys) {
    const absl::string_view bytes = key.view();
    if (hashes == WireHashes::kBytes) {
      packer.pack_bin(static_cast<std::uint32_t>(bytes.size()));
      packer.pack_bin_body(bytes.data(), static_cast<std::uint32_t>(bytes.size()));
      continue;
    }
    std::uint64_t number = 0;
    for (const char byte : bytes.substr(bytes.size() - std::min<std::size_t>(bytes.size(), 8))) {
      number = number << 8 | static_cast<unsigned char>(byte);
    }
    packer.pack_uint64(number);  // In as many bytes as it needs.
  }
}

}  // namespace

const char* MediumOf(Tier tier) {
  switch (tier) {
    case Tier::kGpu:
      return "GPU";
    case Tier::kHost:
      return "CPU";
    case Tier::kDisk:
      return "DISK";
    case Tier::kPeer:
      break;
  }
  return "REMOTE";
}

std::vector<WireEvent> ToWireEvents(absl::Span<const BlockEvent> events,
                                    const std::function<WireNamespace(NamespaceId)>& namespace_of) {
  std::vector<WireEvent> result;
  for (std::size_t begin = 0; begin < events.size();) {
    const BlockEvent& first = events[begin];
    const WireNamespace space = namespace_of(first.namespace_id);
    std::vector<BlockKey> keys;
    std::size_t end = begin;
    for (; end < events.size(); ++end) {
      const BlockEvent& event = events[end];
      if (event.kind != first.kind || event.namespace_id != first.namespace_id ||
          event.tier != first.tier || event.from != first.from) {
        break;
      }
      if (event.token_count == space.block_tokens) keys.push_back(event.key);
    }
    begin = end;
    if (keys.empty()) continue;
    if (first.kind != BlockEvent::Kind::kRemoved) {
      result.push_back(
          {WireEvent::Kind::kStored, first.tier, space.block_tokens, space.adapter, keys});
    }
    if (first.kind == BlockEvent::Kind::kMoved) {
      result.push_back({WireEvent::Kind::kRemoved, first.from, 0, "", std::move(keys)});
    } else if (first.kind == BlockEvent::Kind::kRemoved) {
      result.push_back({WireEvent::Kind::kRemoved, first.tier, 0, "", std::move(keys)});
    }
  }
  return result;
}

std::string PackEvents(double unix_seconds, absl::Span<const WireEvent> events, WireHashes hashes) {
  msgpack::sbuffer buffer;
  Packer packer(buffer);
  packer.pack_array(3);
  PackDouble(buffer, unix_seconds);
  packer.pack_array(static_cast<std::uint32_t>(events.size()));
  for (const WireEvent& event : events) {
    switch (event.kind) {
      case WireEvent::Kind::kStored:
        packer.pack_array(8);
        PackText(packer, "BlockStored");
        PackHashes(packer, event.keys, hashes);
        packer.pack_nil();
        packer.pack_array(0);
        packer.pack_uint32(event.block_tokens);
        packer.pack_nil();
        PackText(packer, MediumOf(event.tier));
        PackTextOrNil(packer, event.adapter);
        break;
      case WireEvent::Kind::kRemoved:
        packer.pack_array(3);
        PackText(packer, "BlockRemoved");
        PackHashes(packer, event.keys, hashes);
        PackText(packer, MediumOf(event.tier));
        break;
      case WireEvent::Kind::kCleared:
        packer.pack_array(1);
        PackText(packer, "AllBlocksCleared");
        break;
    }
  }
  packer.pack_uint32(0);
  return std::string(buffer.data(), buffer.size());
}

std::string PackSequence(std::uint64_t sequence) {
  std::string bytes(8, '\0');
  for (int i = 0; i < 8; ++i) {
    bytes[static_cast<std::size_t>(i)] = static_cast<char>(sequence >> (56 - 8 * i));
  }
  return bytes;
}

}  // namespace kvmill
