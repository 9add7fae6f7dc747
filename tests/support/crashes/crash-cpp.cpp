// Reads a number, and crashes in a thread if it is 2: at an address that is not mapped.
#include <cstdio>
#include <map>
#include <string>
#include <thread>

namespace shop {
struct Order {
    std::string name;
    const long *count;
};

template <typename Key> class Ledger {
    std::map<Key, Order> orders;

  public:
    void add(const Key &key, const std::string &name, const long *count) { orders[key] = Order{name, count}; }
    __attribute__((noinline)) long total(const Key &key) const { return *orders.at(key).count + 1; }
};
} // namespace shop

static const long few = 3;

int main()
{
    shop::Ledger<int> ledger;
    ledger.add(1, "apples", &few);
    ledger.add(2, "pears", reinterpret_cast<const long *>(16));
    printf("crash: ready\n");
    fflush(stdout);
    int key = 0;
    if (scanf("%d", &key) != 1)
        return 1;
    std::thread worker([&ledger, key] { printf("%ld\n", ledger.total(key)); });
    worker.join();
    return 0;
}
