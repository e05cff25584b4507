// The long forms of tests: `tests/run.sh --long` sets KVMILL_LONG, and tests that draw their cases
// from a seed run more of them.
#ifndef KVMILL_TESTS_LONG_FORM_H_
#define KVMILL_TESTS_LONG_FORM_H_

#include <cstdlib>
#include <string_view>

namespace kvmill {

// KVMILL_LONG is set to something other than "", "0".
inline bool LongForm() {
  const char* value = std::getenv("KVMILL_LONG");
  return value != nullptr && std::string_view(value) != "" && std::string_view(value) != "0";
}

// How often, how many, how long: the everyday number, or the one of the long form.
template <typename T>
T ShortOrLong(T everyday, T in_long_form) {
  return LongForm() ? in_long_form : everyday;
}

}  // namespace kvmill

#endif  // KVMILL_TESTS_LONG_FORM_H_
