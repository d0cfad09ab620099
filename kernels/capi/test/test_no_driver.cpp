// Without a driver or a device a context is refused in words; with one it can be made and destroyed.
#include <cstring>

#include "check.h"
#include "specdec_kernels.h"

int main() {
  specdec_context* context = nullptr;
  const int status = specdec_create(&context, 0);
  std::cout << specdec_status_string(status) << '\n';
  CHECK(status == SPECDEC_OK || status == SPECDEC_NO_DRIVER || status == SPECDEC_NO_DEVICE ||
        status == SPECDEC_NO_KERNEL);
  CHECK((context != nullptr) == (status == SPECDEC_OK));
  CHECK(std::strcmp(specdec_status_string(status), "unknown status") != 0);
  specdec_destroy(context);
  return failures != 0;
}
