// The checksum under every blob and block that RocksDB writes or reads, at the speed of the
// machine.
//
// Debian builds RocksDB for processors without the CRC-32C instruction, so that checksums were 60 %
// of the processor time of a write (0.9 s a GB). The library exports its checksum function and
// calls it through the dynamic linker; this file defines the same function on ISA-L, which chooses
// the instructions at run time. Same polynomial, same results: files do not change, and where the
// definition is not picked up (another build of RocksDB) everything works, slower.
#ifndef KVMILL_STORAGE_ROCKS_CRC32C_H_
#define KVMILL_STORAGE_ROCKS_CRC32C_H_

namespace kvmill {

// Whether RocksDB's calls reach our definition. Whoever opens a database asks, which also makes
// the linker take the definition. Thread-safe.
bool RocksUsesFastCrc32c();

}  // namespace kvmill

#endif  // KVMILL_STORAGE_ROCKS_CRC32C_H_
