// The question is put as Linux wants it, and its answer is passed on; the real system is asked as
// well.
#include "check.h"
#include "tile_permission.h"

using torch_hybrid_backend::MayUseTiles;

namespace {

int asked_code = 0;
unsigned long asked_feature = 0;

long Permit(int code, unsigned long feature) {
  asked_code = code;
  asked_feature = feature;
  return 0;
}

long Refuse(int, unsigned long) { return -1; }

}  // namespace

int main() {
  Check(MayUseTiles(&Permit), "zero is permission");
  Check(asked_code == 0x1023, "the process asks for a state component");
  Check(asked_feature == 18, "that of the tiles");
  Check(!MayUseTiles(&Refuse), "anything else is none");
  Check(MayUseTiles() == MayUseTiles(), "asking again changes nothing");
  return 0;
}
