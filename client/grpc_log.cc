#include "client/grpc_log.h"

#include <grpc/support/log.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "storage/core/log.h"

namespace kvmill {

void TakeGrpcLog(bool as_it_is) {
  if (as_it_is) return;
  gpr_set_log_function([](gpr_log_func_args* line) {
    absl::string_view file = line->file;
    file.remove_prefix(file.rfind('/') + 1);  // npos + 1 is 0.
    LogDebug(absl::StrCat("gRPC: ", file, ":", line->line, ": ", line->message));
  });
}

}  // namespace kvmill
