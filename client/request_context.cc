#include "client/request_context.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace kvmill {
namespace {

// version "-" trace-id "-" parent-id "-" flags
constexpr std::size_t kTraceIdAt = 3, kTraceIdBytes = 32;
constexpr std::size_t kSpanIdAt = 36, kSpanIdBytes = 16;
constexpr std::size_t kFlagsAt = 53, kTraceparentBytes = 55;
constexpr std::size_t kTracestateMembersMax = 32, kTracestateBytesMax = 512;

thread_local const RequestScope* scope_of_thread = nullptr;

bool IsLowerHex(absl::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsZero(absl::string_view hex) { return hex.find_first_not_of('0') == hex.npos; }

// lcalpha or digit first, then those and _ - * /; "tenant@system" has two parts.
bool IsStateKey(absl::string_view key) {
  constexpr std::size_t kKeyBytesMax = 256, kTenantBytesMax = 241, kSystemBytesMax = 14;
  const auto is_lower = [](char c) { return c >= 'a' && c <= 'z'; };
  const auto is_part = [&](absl::string_view part, std::size_t bytes_max, bool letter_first) {
    if (part.empty() || part.size() > bytes_max) return false;
    if (!is_lower(part[0]) && (letter_first || !absl::ascii_isdigit(part[0]))) return false;
    return std::all_of(part.begin(), part.end(), [&](char c) {
      return is_lower(c) || absl::ascii_isdigit(c) || c == '_' || c == '-' || c == '*' || c == '/';
    });
  };
  const std::size_t at = key.find('@');
  if (at == key.npos) return is_part(key, kKeyBytesMax, /*letter_first=*/true);
  return is_part(key.substr(0, at), kTenantBytesMax, /*letter_first=*/false) &&
         is_part(key.substr(at + 1), kSystemBytesMax, /*letter_first=*/true);
}

bool IsStateValue(absl::string_view value) {
  constexpr std::size_t kValueBytesMax = 256;
  if (value.empty() || value.size() > kValueBytesMax || value.back() == ' ') return false;
  return std::all_of(value.begin(), value.end(),
                     [](char c) { return c >= ' ' && c <= '~' && c != ',' && c != '='; });
}

}  // namespace

absl::string_view RequestContext::trace_id() const {
  if (traceparent.size() < kTraceparentBytes) return "";
  return absl::string_view(traceparent).substr(kTraceIdAt, kTraceIdBytes);
}

absl::string_view RequestContext::span_id() const {
  if (traceparent.size() < kTraceparentBytes) return "";
  return absl::string_view(traceparent).substr(kSpanIdAt, kSpanIdBytes);
}

bool IsRequestId(absl::string_view text) {
  return !text.empty() && text.size() <= kRequestIdBytesMax &&
         std::all_of(text.begin(), text.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
                  absl::string_view("._-:/+=@").find(c) != absl::string_view::npos;
         });
}

bool IsTraceparent(absl::string_view text) {
  if (text.size() < kTraceparentBytes) return false;
  const absl::string_view version = text.substr(0, 2);
  if (!IsLowerHex(version) || version == "ff") return false;
  if (version == "00" && text.size() != kTraceparentBytes) return false;
  if (text.size() > kTraceparentBytes && text[kTraceparentBytes] != '-') return false;
  for (const std::size_t dash : {kTraceIdAt - 1, kSpanIdAt - 1, kFlagsAt - 1}) {
    if (text[dash] != '-') return false;
  }
  const absl::string_view trace = text.substr(kTraceIdAt, kTraceIdBytes);
  const absl::string_view span = text.substr(kSpanIdAt, kSpanIdBytes);
  return IsLowerHex(trace) && !IsZero(trace) && IsLowerHex(span) && !IsZero(span) &&
         IsLowerHex(text.substr(kFlagsAt, 2));
}

bool IsTracestate(absl::string_view text) {
  if (text.size() > kTracestateBytesMax) return false;
  std::set<absl::string_view> keys;
  std::size_t members = 0;
  for (absl::string_view member : absl::StrSplit(text, ',')) {
    while (absl::ConsumePrefix(&member, " ") || absl::ConsumePrefix(&member, "\t")) {
    }
    while (absl::ConsumeSuffix(&member, " ") || absl::ConsumeSuffix(&member, "\t")) {
    }
    if (++members > kTracestateMembersMax) return false;
    if (member.empty()) continue;  // Allowed, and counts.
    const std::size_t equals = member.find('=');
    if (equals == member.npos || !IsStateKey(member.substr(0, equals)) ||
        !IsStateValue(member.substr(equals + 1)) || !keys.insert(member.substr(0, equals)).second) {
      return false;
    }
  }
  return !keys.empty();
}

RequestContext RightPartsOf(RequestContext context) {
  if (!IsRequestId(context.request_id)) context.request_id.clear();
  if (!IsTraceparent(context.traceparent)) context.traceparent.clear();
  if (context.traceparent.empty() || !IsTracestate(context.tracestate)) context.tracestate.clear();
  if (!context.traceparent.empty() && context.traceparent.compare(0, 2, "00") != 0) {
    // Of its flags only `sampled` is known to mean the same.
    const bool sampled =
        (context.traceparent[kFlagsAt + 1] >= 'a' ? context.traceparent[kFlagsAt + 1] - 'a' + 10
                                                  : context.traceparent[kFlagsAt + 1] - '0') %
            2 ==
        1;
    context.traceparent =
        absl::StrCat("00", context.traceparent.substr(2, kFlagsAt - 2), sampled ? "01" : "00");
  }
  return context;
}

RequestScope::RequestScope(RequestContext context)
    : RequestScope(std::make_shared<const RequestContext>(RightPartsOf(std::move(context)))) {}

RequestScope::RequestScope(RequestPtr context)
    : context_(std::move(context)), outer_(std::exchange(scope_of_thread, this)) {}

RequestScope::~RequestScope() { scope_of_thread = outer_; }

RequestPtr CurrentRequest() {
  return scope_of_thread == nullptr ? nullptr : scope_of_thread->context_;
}

}  // namespace kvmill
