// gRPC's own log, of programs that are kvmill's: kvmilld and kvmill. A library does not set it for
// the process that it is in.
#ifndef KVMILL_CLIENT_GRPC_LOG_H_
#define KVMILL_CLIENT_GRPC_LOG_H_

namespace kvmill {

// What gRPC logs of its own accord (a handshake that failed, which a call then says, too) becomes
// lines of ours, of level debug. Once, before there are connections. Somebody who set
// GRPC_VERBOSITY gets it as it is: pass true.
void TakeGrpcLog(bool as_it_is);

}  // namespace kvmill

#endif  // KVMILL_CLIENT_GRPC_LOG_H_
