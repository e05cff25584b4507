// Messages that nobody should send: protobuf messages of any type from a seed, by reflection.
#ifndef KVMILL_TESTS_INTEGRATION_MESSAGE_MUTATOR_H_
#define KVMILL_TESTS_INTEGRATION_MESSAGE_MUTATOR_H_

#include <google/protobuf/message.h>

#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace kvmill::testing {

// --seed=N of the command line, else a new one; printed.
std::uint64_t SeedArgument();

// The same seed and calls make the same messages.
class MessageMutator {
 public:
  explicit MessageMutator(std::uint64_t seed) : random_(seed) {}

  std::uint64_t Below(std::uint64_t n) { return random_() % n; }
  bool OneIn(std::uint64_t n) { return Below(n) == 0; }

  // Values that fields of this name get now and then, so that messages come further than to the
  // first check: the name of a namespace that there is, a living session.
  void Know(const std::string& field, const std::string& bytes) {
    known_bytes_[field].push_back(bytes);
  }
  void Know(const std::string& field, std::uint64_t number) {
    known_numbers_[field].push_back(number);
  }
  void Forget(const std::string& field) {
    known_bytes_.erase(field);
    known_numbers_.erase(field);
  }

  // Fields at random: at their edges, of lengths around limits, with numbers that no enum has.
  void Fill(google::protobuf::Message* message) { Fill(message, 0); }
  // Changes some fields, wherever they are: other values, fewer or more elements, another case of a
  // oneof.
  void Mutate(google::protobuf::Message* message, int changes);
  // Cut, flipped, repeated, lengthened.
  std::string Damage(std::string bytes);

 private:
  using Field = google::protobuf::FieldDescriptor;

  void Fill(google::protobuf::Message* message, int depth);
  void Change(google::protobuf::Message* message, const Field* field);
  // One value: of the field, or appended to it.
  void Give(google::protobuf::Message* message, const Field* field, int depth);
  std::uint64_t Number(const std::string& field);
  std::string Bytes(const std::string& field, bool text);
  std::uint64_t Count();

  std::mt19937_64 random_;
  std::map<std::string, std::vector<std::string>> known_bytes_;
  std::map<std::string, std::vector<std::uint64_t>> known_numbers_;
};

}  // namespace kvmill::testing

#endif  // KVMILL_TESTS_INTEGRATION_MESSAGE_MUTATOR_H_
