// Which tenants nodes share, and that a fingerprint means one of them alone.
#include "service/tenants.h"

#include <string>

#include "service/cluster/anchor.h"
#include "tests/storage/tiered_store_fixture.h"

namespace kvmill {
namespace {

NamespaceSpec Of(NamespaceSpec spec, const std::string& tenant) {
  spec.tenant = tenant;
  return spec;
}

TEST(TenantsTest, WhoIsSharedIsForTheNodeToSay) {
  const struct {
    SharedTenants::Options options;
    bool named, local_user;
  } cases[] = {{{}, false, false},
               {{.named = true}, true, false},
               {{.local_users = true}, false, true},
               {{.named = true, .local_users = true}, true, true}};
  for (const auto& c : cases) {
    const SharedTenants shared(c.options);
    EXPECT_TRUE(shared.Has("default"));
    EXPECT_EQ(shared.Has("team-a"), c.named);
    EXPECT_EQ(shared.Has("uid-1000"), c.local_user);
    EXPECT_EQ(shared.Has("uid-"), c.local_user) << "nobody else can be called so";
    for (const char* none : {"", "all", "other", "a b"}) EXPECT_FALSE(shared.Has(none)) << none;
  }
  EXPECT_FALSE(SharedTenants().Has("team-a")) << "nobody but the daemons' own";
}

class SharedSpacesTest : public TieredStoreTest {};

TEST_F(SharedSpacesTest, AFingerprintIsOfOneTenant) {
  Open(false);
  const SharedTenants named({.named = true}), none;
  const auto a = store_->OpenNamespace("shared", Of(Spec(), "team-a"));
  const auto b = store_->OpenNamespace("shared", Of(Spec(), "team-b"));
  const auto user = store_->OpenNamespace("shared", Of(Spec(), "uid-7"));
  ASSERT_TRUE(a.ok() && b.ok() && user.ok());
  // Of the same spec, under the same name.
  EXPECT_NE(a->fingerprint, b->fingerprint);
  EXPECT_NE(AnchorHash(a->fingerprint, Key(1)), AnchorHash(b->fingerprint, Key(1)))
      << "or one's announcements would be the other's";
  for (const auto& space : {*a, *b}) {
    const auto found = named.Find(*store_, space.fingerprint);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->id, space.id);
    EXPECT_EQ(found->spec.tenant, space.spec.tenant);
  }
  EXPECT_EQ(named.Find(*store_, user->fingerprint).status().code(), absl::StatusCode::kNotFound);
  // What is not shared sounds like what is not there.
  Fingerprint absent = a->fingerprint;
  absent[0] ^= std::byte{1};
  for (const Fingerprint& fingerprint : {a->fingerprint, absent}) {
    const absl::Status says = none.Find(*store_, fingerprint).status();
    EXPECT_EQ(says.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(says.message(), "namespace " + ToHex(fingerprint) + " is not known here");
  }
  EXPECT_EQ(none.Find(*store_, FingerprintOf(Spec()))->id, space_);
}

}  // namespace
}  // namespace kvmill
