#include "tests/integration/raw_call.h"

#include <cstdint>

#include "client/door_protocol.h"

namespace kvmill::testing {
namespace {

enum class Event : std::intptr_t { kStart = 1, kWrite, kHalfClose, kRead, kFinish };

void* TagOf(Event event) { return reinterpret_cast<void*>(static_cast<std::intptr_t>(event)); }

}  // namespace

RawAnswer CallRaw(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                  const std::vector<std::string>& messages, const RawCallOptions& options) {
  RawAnswer answer;
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + options.timeout);
  if (!options.token_hex.empty()) context.AddMetadata(kDoorTokenMetadata, options.token_hex);
  const auto call = stub.PrepareCall(&context, method, &queue);
  grpc::ByteBuffer incoming;
  grpc::ByteBuffer outgoing;
  std::size_t next = 0;
  bool writes_ended = false;
  bool reads_ended = false;
  const auto write = [&] {
    if (next < messages.size()) {
      outgoing = BufferOf(messages[next++]);
      call->Write(outgoing, TagOf(Event::kWrite));
    } else {
      call->WritesDone(TagOf(Event::kHalfClose));
    }
  };
  call->StartCall(TagOf(Event::kStart));
  void* tag = nullptr;
  bool ok = false;
  for (int events = 0; queue.Next(&tag, &ok); ++events) {
    if (events == options.cut_after) context.TryCancel();
    switch (static_cast<Event>(reinterpret_cast<std::intptr_t>(tag))) {
      case Event::kStart:
        if (ok) {
          call->Read(&incoming, TagOf(Event::kRead));
          write();
        } else {
          writes_ended = reads_ended = true;
        }
        break;
      case Event::kWrite:
        ok ? write() : static_cast<void>(writes_ended = true);
        break;
      case Event::kHalfClose:
        writes_ended = true;
        break;
      case Event::kRead:
        if (ok) {
          answer.replies.push_back(TextOf(incoming));
          call->Read(&incoming, TagOf(Event::kRead));
        } else {
          reads_ended = true;
        }
        break;
      case Event::kFinish:
        queue.Shutdown();
        continue;
    }
    if (writes_ended && reads_ended) {
      call->Finish(&answer.status, TagOf(Event::kFinish));
      reads_ended = false;  // Once.
    }
  }
  return answer;
}

}  // namespace kvmill::testing
