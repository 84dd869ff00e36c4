// 2 x 3 tiles over devices that count 3 x 2: no axis is part of one dimension only
module @f attributes {mhlo.num_partitions = 6 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<6x6xf32> {mhlo.sharding = "{devices=[2,3]<=[2,3]T(1,0)}"}) -> (tensor<6x6xf32> {mhlo.sharding = "{devices=[2,3]<=[6]}"}) {
    return %arg0 : tensor<6x6xf32>
  }
}
