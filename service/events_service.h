// kvmill.v1.Events: what happens to the blocks of the caller's tenant.
#ifndef KVMILL_SERVICE_EVENTS_SERVICE_H_
#define KVMILL_SERVICE_EVENTS_SERVICE_H_

#include "kvmill/v1/events.grpc.pb.h"
#include "service/event_journal.h"
#include "service/service_context.h"

namespace kvmill {

class EventsService final : public v1::Events::WithCallbackMethod_Watch<v1::Events::Service> {
 public:
  EventsService(const ServiceContext& context, EventJournal& journal)
      : context_(context), journal_(journal) {}

  grpc::ServerWriteReactor<v1::WatchReply>* Watch(grpc::CallbackServerContext* call,
                                                  const v1::WatchRequest* request) override;

 private:
  const ServiceContext& context_;
  EventJournal& journal_;
};

}  // namespace kvmill

#endif  // KVMILL_SERVICE_EVENTS_SERVICE_H_
