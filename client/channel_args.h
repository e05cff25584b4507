// HTTP/2 settings that both ends of a kvmill connection use; the numbers are measured
// (docs/perf.md). Internal to client/ and service/.
#ifndef KVMILL_CLIENT_CHANNEL_ARGS_H_
#define KVMILL_CLIENT_CHANNEL_ARGS_H_

#include <grpc/grpc.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace kvmill {

inline constexpr int kFrameBytesMax = 4 << 20;      // Bulk messages in few frames.
inline constexpr int kStreamWindowBytes = 8 << 20;  // What may travel unread on one stream.
inline constexpr int kWriteBufferBytes = 2 << 20;   // Written ahead of the socket.
inline constexpr int kReadChunkBytes = 256 << 10;
inline constexpr int kReadChunkBytesMax = 1 << 20;
inline constexpr int kKeepaliveMs = 20'000;         // A stopped peer is noticed after this,
inline constexpr int kKeepaliveTimeoutMs = 10'000;  //   plus this.

// (channel argument, value), for grpc::ChannelArguments::SetInt and
// grpc::ServerBuilder::AddChannelArgument.
inline std::vector<std::pair<const char*, int>> BulkChannelArgs() {
  return {
      {GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytesMax},
      {GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kStreamWindowBytes},
      {GRPC_ARG_HTTP2_BDP_PROBE, 0},
      {GRPC_ARG_HTTP2_WRITE_BUFFER_SIZE, kWriteBufferBytes},
      {GRPC_ARG_TCP_READ_CHUNK_SIZE, kReadChunkBytes},
      {GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, kReadChunkBytesMax},
      {GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs},
      {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs},
  };
}

// Of a connection to one server of a cluster, which is made again for as long as that is a member.
// gRPC answers from memory while it waits to connect again, for two minutes in the end if left to
// itself: so who calls waits before it tries again, and gRPC does not for long.
struct ReconnectMs {
  int first = 100, last = 2000;
  int connect = 2000;
};
inline constexpr int kMemberPingMs =
    10'000;  // etcd hangs up on who pings more often than every 5 s,
inline constexpr int kMemberPingTimeoutMs = 5'000;  // daemons on kKeepaliveMs / 2.
static_assert(kMemberPingMs >= kKeepaliveMs / 2);
inline std::vector<std::pair<const char*, int>> MemberChannelArgs(const ReconnectMs& reconnect) {
  return {
      {GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, reconnect.first},
      {GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, reconnect.last},
      {GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, reconnect.connect},
      {GRPC_ARG_KEEPALIVE_TIME_MS, kMemberPingMs},
      {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kMemberPingTimeoutMs},
      // A connection of one's own, so that another's trouble is not this one's; and proxies of the
      // environment are for the outside world.
      {GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1},
      {GRPC_ARG_ENABLE_HTTP_PROXY, 0},
  };
}

}  // namespace kvmill

#endif  // KVMILL_CLIENT_CHANNEL_ARGS_H_
