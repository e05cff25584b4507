#include "tests/integration/message_mutator.h"

#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <limits>
#include <utility>

namespace kvmill::testing {
namespace {

using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr int kDepthMax = 4;
constexpr std::uint64_t kLengths[] = {0,    1,    2,    8,    15,   16,    17,  31,
                                      32,   63,   64,   65,   128,  255,   256, 1023,
                                      1024, 1025, 4095, 4096, 4097, 70'000};

}  // namespace

std::uint64_t SeedArgument() {
  std::uint64_t seed = std::random_device{}();
  for (const std::string& argument : ::testing::internal::GetArgvs()) {
    if (argument.rfind("--seed=", 0) == 0) seed = std::stoull(argument.substr(7));
  }
  std::printf("--seed=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

std::uint64_t MessageMutator::Number(const std::string& field) {
  const auto known = known_numbers_.find(field);
  if (known != known_numbers_.end() && !OneIn(3)) {
    const std::uint64_t value = known->second[Below(known->second.size())];
    return OneIn(8) ? value + Below(3) - 1 : value;
  }
  switch (Below(6)) {
    case 0:
      return 0;
    case 1:
      return Below(5);
    case 2:
      return std::numeric_limits<std::uint64_t>::max() - Below(2);
    case 3:
      return random_();
    default:  // Around the powers of two.
      return (std::uint64_t{1} << Below(64)) + Below(3) - 1;
  }
}

std::string MessageMutator::Bytes(const std::string& field, bool text) {
  const auto known = known_bytes_.find(field);
  if (known != known_bytes_.end() && !OneIn(4)) {
    std::string value = known->second[Below(known->second.size())];
    if (!value.empty() && OneIn(10)) value[Below(value.size())] ^= 1;
    return value;
  }
  const std::size_t lengths = std::size(kLengths) - (OneIn(20) ? 0 : 1);
  std::string value(kLengths[Below(lengths)], 'x');
  if (text && !OneIn(24)) {
    for (char& c : value) c = static_cast<char>(' ' + Below(95));
  } else {
    for (char& c : value) c = static_cast<char>(Below(256));
  }
  return value;
}

std::uint64_t MessageMutator::Count() {
  const std::uint64_t draw = Below(100);
  if (draw < 60) return Below(3);
  if (draw < 95) return Below(9);
  return draw < 99 ? Below(100) : Below(5000);
}

void MessageMutator::Give(Message* message, const Field* field, int depth) {
  const Reflection& r = *message->GetReflection();
  const bool more = field->is_repeated();
  const std::string& name = field->name();
  // Enums are open: every number is on the wire.
  const auto give = [&](auto set, auto add, auto value) {
    more ? (r.*add)(message, field, value) : (r.*set)(message, field, value);
  };
  switch (field->cpp_type()) {
    case Field::CPPTYPE_INT32:
      return give(&Reflection::SetInt32, &Reflection::AddInt32,
                  static_cast<std::int32_t>(Number(name)));
    case Field::CPPTYPE_INT64:
      return give(&Reflection::SetInt64, &Reflection::AddInt64,
                  static_cast<std::int64_t>(Number(name)));
    case Field::CPPTYPE_UINT32:
      return give(&Reflection::SetUInt32, &Reflection::AddUInt32,
                  static_cast<std::uint32_t>(Number(name)));
    case Field::CPPTYPE_UINT64:
      return give(&Reflection::SetUInt64, &Reflection::AddUInt64, Number(name));
    case Field::CPPTYPE_DOUBLE: {
      const double values[] = {0, -1, 1e308, std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::quiet_NaN()};
      return give(&Reflection::SetDouble, &Reflection::AddDouble, values[Below(std::size(values))]);
    }
    case Field::CPPTYPE_FLOAT:
      return give(&Reflection::SetFloat, &Reflection::AddFloat, static_cast<float>(Below(3)) - 1);
    case Field::CPPTYPE_BOOL:
      return give(&Reflection::SetBool, &Reflection::AddBool, OneIn(2));
    case Field::CPPTYPE_ENUM: {
      const int value =
          OneIn(3) ? static_cast<int>(Number(name))
                   : field->enum_type()
                         ->value(static_cast<int>(
                             Below(static_cast<std::uint64_t>(field->enum_type()->value_count()))))
                         ->number();
      return give(&Reflection::SetEnumValue, &Reflection::AddEnumValue, value);
    }
    case Field::CPPTYPE_STRING: {
      std::string value = Bytes(name, field->type() == Field::TYPE_STRING);
      more ? r.AddString(message, field, std::move(value))
           : r.SetString(message, field, std::move(value));
      return;
    }
    case Field::CPPTYPE_MESSAGE:
      return Fill(more ? r.AddMessage(message, field) : r.MutableMessage(message, field),
                  depth + 1);
  }
}

void MessageMutator::Fill(Message* message, int depth) {
  if (depth > kDepthMax) return;
  const auto* type = message->GetDescriptor();
  for (int i = 0; i < type->field_count(); ++i) {
    const Field* field = type->field(i);
    if (OneIn(4)) continue;
    // Elements of messages are large, and have further ones in them.
    const bool nested = field->cpp_type() == Field::CPPTYPE_MESSAGE;
    const std::uint64_t count = !field->is_repeated() ? 1
                                : nested              ? std::min<std::uint64_t>(Count(), 40)
                                                      : Count();
    for (std::uint64_t n = 0; n < count; ++n) Give(message, field, depth);
  }
}

void MessageMutator::Change(Message* message, const Field* field) {
  const Reflection& r = *message->GetReflection();
  if (!field->is_repeated()) {
    OneIn(4) ? r.ClearField(message, field) : Give(message, field, kDepthMax);
    return;
  }
  const int size = r.FieldSize(*message, field);
  switch (size == 0 ? 0 : Below(5)) {
    case 0:
      return Give(message, field, kDepthMax);
    case 1:
      return r.RemoveLast(message, field);
    case 2:
      return r.SwapElements(message, field, 0,
                            static_cast<int>(Below(static_cast<std::uint64_t>(size))));
    case 3:
      r.ClearField(message, field);
      for (std::uint64_t n = Count(); n > 0; --n) Give(message, field, kDepthMax);
      return;
    default:  // Another last one.
      r.RemoveLast(message, field);
      return Give(message, field, kDepthMax);
  }
}

void MessageMutator::Mutate(Message* message, int changes) {
  for (; changes > 0; --changes) {
    std::vector<std::pair<Message*, const Field*>> places;
    std::vector<Message*> todo = {message};
    while (!todo.empty() && places.size() < 4000) {
      Message* const at = todo.back();
      todo.pop_back();
      const Reflection& r = *at->GetReflection();
      const auto* type = at->GetDescriptor();
      for (int i = 0; i < type->field_count(); ++i) {
        const Field* field = type->field(i);
        places.emplace_back(at, field);
        if (field->cpp_type() != Field::CPPTYPE_MESSAGE) continue;
        if (!field->is_repeated()) {
          if (r.HasField(*at, field)) todo.push_back(r.MutableMessage(at, field));
          continue;
        }
        for (int n = 0; n < r.FieldSize(*at, field); ++n) {
          todo.push_back(r.MutableRepeatedMessage(at, field, n));
        }
      }
    }
    if (places.empty()) return;  // A message without fields.
    const auto& [at, field] = places[Below(places.size())];
    Change(at, field);
  }
}

std::string MessageMutator::Damage(std::string bytes) {
  for (std::uint64_t n = 1 + Below(3); n > 0; --n) {
    const std::size_t at = bytes.empty() ? 0 : Below(bytes.size());
    switch (Below(4)) {
      case 0:
        bytes.resize(at);
        break;
      case 1:
        if (!bytes.empty()) bytes[at] = static_cast<char>(bytes[at] ^ (1 << Below(8)));
        break;
      case 2:
        bytes.insert(at, bytes.substr(at, 1 + Below(40)));
        break;
      default:
        for (std::uint64_t more = 1 + Below(20); more > 0; --more) {
          bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                       static_cast<char>(Below(256)));
        }
    }
  }
  return bytes;
}

}  // namespace kvmill::testing
